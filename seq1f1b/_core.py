"""The one module that touches the extension. Everything else imports what it needs of the C core from here."""

from __future__ import annotations

from seq1f1b import _C

ScheduleError = _C.ScheduleError
PipelineError = _C.PipelineError

# partition
partition_even = _C.partition_even
partition_flops = _C.partition_flops
partition_documents = _C.partition_documents
partition_profiled = _C.partition_profiled
partition_check = _C.partition_check
model_flops = _C.model_flops

# p2p
mapping_create = _C.mapping_create
group_block_bytes = _C.group_block_bytes
group_create = _C.group_create
group_set_limits = _C.group_set_limits
group_set_poison = _C.group_set_poison
group_begin_step = _C.group_begin_step
group_progress = _C.group_progress
group_set_progress = _C.group_set_progress
group_get_progress = _C.group_get_progress
group_fail = _C.group_fail
group_check = _C.group_check
group_failure = _C.group_failure
group_clear = _C.group_clear
group_gather = _C.group_gather
arena_end = _C.arena_end
relay_end = _C.relay_end
relay_done = _C.relay_done
relay_flush = _C.relay_flush
message_payload_bytes = _C.message_payload_bytes
edge_begin_step = _C.edge_begin_step
edge_post = _C.edge_post
edge_wait = _C.edge_wait
edge_send = _C.edge_send
place_tensor_capsule = _C.place_tensor_capsule

# devices
device_create = _C.device_create
device_begin_step = _C.device_begin_step
device_free_bytes = _C.device_free_bytes
watchdog_create = _C.watchdog_create
watchdog_set_timeout = _C.watchdog_set_timeout
nccl_find = _C.nccl_find
nccl_unique_id = _C.nccl_unique_id
nccl_end = _C.nccl_end
nccl_connect = _C.nccl_connect
nccl_leave = _C.nccl_leave
copy_end = _C.copy_end
device_end_close = _C.device_end_close

# schedule
schedule_families = _C.schedule_families
schedule_build = _C.schedule_build
schedule_broken_rule = _C.schedule_broken_rule
schedule_counts = _C.schedule_counts
schedule_placement = _C.schedule_placement
schedule_units = _C.schedule_units
schedule_check = _C.schedule_check
schedule_forward_only = _C.schedule_forward_only
schedule_to_text = _C.schedule_to_text
schedule_to_csv = _C.schedule_to_csv
schedule_from_text = _C.schedule_from_text
schedule_from_csv = _C.schedule_from_csv
program_lower = _C.program_lower
program_instructions = _C.program_instructions
program_edges = _C.program_edges
program_stage_peak = _C.program_stage_peak
program_peak_tokens = _C.program_peak_tokens
program_rank_peak = _C.program_rank_peak
program_lower_edges = _C.program_lower_edges
program_simulate = _C.program_simulate
program_memory = _C.program_memory

# attention
bind_torch = _C.bind_torch
take_op_failure = _C.take_op_failure
layer_register = _C.layer_register
in_step = _C.in_step
token_offset = _C.token_offset
current_unit = _C.current_unit
kv_cache_create = _C.kv_cache_create
kv_cache_begin_step = _C.kv_cache_begin_step
kv_cache_bytes = _C.kv_cache_bytes
kv_cache_layers = _C.kv_cache_layers
current_unit_set = _C.current_unit_set
current_unit_clear = _C.current_unit_clear
attention_isa = _C.attention_isa
attention_rates = _C.attention_rates
torch_functions = _C.torch_functions

# CUDA kernels
cuda_library_open = _C.cuda_library_open
cuda_operation = _C.cuda_operation
cuda_attention_scratch = _C.cuda_attention_scratch
cuda_attention = _C.cuda_attention

# executor
executor_create = _C.executor_create
executor_step = _C.executor_step
executor_set_device = _C.executor_set_device
executor_last_unit = _C.executor_last_unit
executor_timeline = _C.executor_timeline
executor_totals = _C.executor_totals
executor_stage_measure = _C.executor_stage_measure
