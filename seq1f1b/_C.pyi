"""The functions of the extension, one section per file of csrc/binding/. Handles of the core are opaque capsules."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# ---- errors.c

class ScheduleError(ValueError): ...

class PipelineError(RuntimeError):
    rank: int | None
    unit: str | None
    edge: str | None

# ---- constants.c

PASSES: tuple[str, ...]  # letters; the position is the number of the pass in C
PASS_NAMES: tuple[str, ...]  # of their seconds in Costs; position as above
PASS_TEXTS: tuple[str, ...]  # in words; position as above
OPCODES: tuple[str, ...]  # of instructions; position as above
FAMILY_OPTIONS: tuple[tuple[str, str, int, tuple[str, str]], ...]  # name, kind, least of a number, words
DTYPES: tuple[str, ...]  # names in torch; position as above
PER_RANK: int  # what a table of seconds or bytes has a value for
PER_STAGE: int
PER_PAIR: int
PER_SEGMENT: int
PER_CELL: int
NO_RANK: int  # for program_lower
ARENA_BYTES: int  # address space of an edge's arena
GATHER_BYTES: int  # most that one rank gives to group_gather
HEADER_BYTES: int  # of a message, before its payload
TENSOR_REQUIRES_GRAD: int  # flags of a tensor in a message
TENSOR_NONE: int
TIER_ALIGNMENT: int  # bytes: of memory that a tier reads into

_Unit = tuple[int, int, int, int]  # pass, stage, micro-batch, segment
_Ints = array[int]  # of 64 bits, but for segments and parents, of 32
_Doubles = array[float]

# ---- records.c

class ProgramEdge(NamedTuple):
    source_stage: int
    destination_stage: int
    source_rank: int
    destination_rank: int
    channel: int  # csrc/core/unit.h
    num_places: int
    num_messages: int

class CurrentUnit(NamedTuple):
    pass_: int
    stage: int
    microbatch: int
    segment: int
    num_segments: int
    training: bool
    offset: int  # tokens, as the next two
    length: int
    sequence_length: int

class CacheLayer(NamedTuple):
    stage: int
    layer: int
    batch: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_element_bytes: int
    grad_element_bytes: int
    with_docs: bool

class CudaKernel(NamedTuple):
    name: str
    dtype: str
    head_dim: int
    products: int  # matrix products of a pair of tiles; 0: it has none

class TierFacts(NamedTuple):
    medium: str  # "ext4", or "pinned memory"
    is_memory: bool
    room_bytes: int  # of the file, or pinned
    bytes_out: int
    bytes_in: int
    ns_out: int
    ns_in: int

# ---- partition.c

def partition(
    seq_len: int,
    num_segments: int,
    flops: tuple[float, float],  # of t tokens: the first times t, and the second times t (t + 1)
    documents: _Ints | None,
    costs: _Doubles | None,  # of equal pieces, in place of these
    mix: float,
    multiple_of: int,
    /,
) -> list[int]: ...

# ---- prefix_trees.c

def prefix_trees(
    num_rows: int,
    begin: int,  # addresses, as core/prefix_trees.h has them
    label: int,
    tokens: int,
    weights: int,
    columns: _Ints,  # address, and bytes of a token, of each
    min_shared: int,
    nodes: int,
    place: int,
    target: int,
    weight: int,
    /,
) -> tuple[int, tuple[int, int, int, int, int]]: ...

# ---- group.c

def descriptor_own(fd: int, /) -> object: ...
def mapping_create(fd: int, bytes: int, /) -> object: ...
def group_block_bytes(num_ranks: int, /) -> int: ...
def group_create(mapping: object, num_ranks: int, rank: int, spoiled: object = ..., /) -> object: ...
def group_set_limits(group: object, timeout_s: float, spin_us: float, /) -> None: ...
def group_enter(group: object, step: int, /) -> None: ...
def group_begin_step(group: object, step: int, /) -> None: ...
def group_finish_step(group: object, last_rank: int, hangup_fd: int, /) -> None: ...
def group_end_step(group: object, /) -> None: ...
def group_is_spoiled(group: object, /) -> bool: ...
def group_progress(group: object, what: str, /) -> None: ...
def group_set_progress(group: object, rank: int, what: str, age_s: float, waiting_for: int, /) -> None: ...
def group_get_progress(group: object, rank: int, /) -> tuple[str, float, int]: ...
def group_fail(
    group: object, rank: int, text: str, unit: str | None = None, edge: str | None = None, step: int = 0, /
) -> None: ...
def group_check(group: object, /) -> None: ...
def group_failure(group: object, /) -> tuple[int, str, str, str, int] | None: ...
def group_leave(group: object, step: int, rank: int, text: str, unit: str = "", edge: str = "", /) -> None: ...
def group_passed(group: object, step: int, /) -> tuple[int, str, str, str, int] | None: ...
def group_clear(group: object, /) -> None: ...
def group_gather(
    group: object, epoch: int, round: int, recovering: bool, data: bytes, hangup_fds: _Ints, /
) -> list[bytes]: ...

# ---- threads.c

def thread_is_helper() -> None: ...
def thread_interpreter_ends() -> None: ...

# ---- edges.c

def arena_end(
    group: object, mapping: object, hangup_fd: int, peer_rank: int, is_receiver: bool, text: str, /
) -> object: ...
def relay_end(
    group: object, mapping: object, relay: Any, peer_rank: int, is_receiver: bool, text: str, /
) -> object: ...
def relay_done(end: object, step: int, sequence: int, /) -> None: ...
def relay_flush(end: object, /) -> None: ...
def message_head(place: int, /) -> tuple[int, int]: ...
def place_tensor_capsule(owner: object, address: int, dtype: int, sizes: _Ints, gpu: int = -1, /) -> Any: ...

# ---- device.c

def device_create(driver_path: str | None, ordinal: int, make_room: Callable[[], int] | None = None, /) -> object: ...
def device_begin_step(device: object, stream: int, /) -> None: ...
def device_restart_unit(device: object, /) -> None: ...
def device_end_unit(device: object, /) -> None: ...
def watchdog_create(group: object, device: object, proof_s: float, /) -> object: ...
def nccl_find(path: str | None, /) -> tuple[int, str]: ...
def nccl_unique_id(path: str | None, /) -> bytes: ...
def nccl_end(path: str | None, id: bytes, control: object, watchdog: object, /) -> object: ...
def device_end_connect(end: object, /) -> None: ...
def device_end_close(end: object, /) -> bool: ...
def copy_end(control: object, watchdog: object, /) -> object: ...
def host_end(control: object, watchdog: object, /) -> object: ...
def edge_end_text(end: object, /) -> str: ...
def edge_proof_post(end: object, bytes: int, /) -> None: ...
def edge_proof_send(end: object, data: int, bytes: int, /) -> float: ...
def edge_proof_receive(end: object, bytes: int, /) -> tuple[int, float]: ...
def edge_proof_give_up(end: object, /) -> bool: ...
def edge_proof_end(end: object, /) -> None: ...

# ---- unit.c

def unit_inputs(
    num_stages: int,
    num_microbatches: int,
    num_segments: int,
    passes: int,
    unit: _Unit,
    num_ranks: int = 1,
    parents: _Ints | None = None,
    /,
) -> list[_Unit]: ...

# ---- schedule.c

def schedule_families() -> list[tuple[str, str, str, str, int, tuple[str, ...], bool, bool]]: ...
def schedule_build(
    family: str,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int,
    stages_per_rank: int,
    options: tuple[Any, ...],
    segments_of: _Ints | None,
    parents: _Ints | None,
    /,
) -> Any: ...
def schedule_broken_rule(*request: Any) -> str | None: ...  # as schedule_build
def schedule_facts(
    schedule: Any, /
) -> tuple[tuple[int, int, int, int], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]: ...
def schedule_assign_rows(schedule: Any, rank: int, sizes: _Ints, /) -> tuple[list[int], int]: ...
def schedule_units(schedule: Any, rank: int, /) -> bytes: ...
def schedule_equal(a: Any, b: Any, /) -> bool: ...
def schedule_digest(schedule: Any, /) -> int: ...
def schedule_cell_kinds(schedule: Any, /) -> bytes: ...
def schedule_check(schedule: Any, max_live_units: int, /) -> None: ...
def schedule_defer_weights(schedule: Any, max_live_units: int, /) -> Any: ...
def schedule_change_cells(schedule: Any, kind: int, chosen: bytes | None, /) -> Any: ...  # 1: recompute, 2: move
def schedule_spread_vocabulary(schedule: Any, what: int, ahead: int, seconds: _Doubles, /) -> Any: ...
def schedule_forward_only(schedule: Any, /) -> Any: ...
def schedule_to_text(schedule: Any, /) -> str: ...
def schedule_from_text(text: str, num_segments: int = 0, /) -> Any: ...
def program_lower(
    schedule: Any, prefetch: int | None, with_receives: bool = False, rank: int = -1, times: _Doubles | None = None, /
) -> Any: ...
def program_edges(program: Any, /) -> list[ProgramEdge]: ...
def program_stage_peak(program: Any, stage: int, /) -> tuple[int, int, int]: ...

# ---- simulate.c

class Holding(NamedTuple):
    name: str  # of its bytes: an attribute of StepMemory
    text: str
    per: int  # PER_STAGE, PER_SEGMENT or PER_CELL
    counts_with: int  # number of the holding whose peak it is a part of

HOLDINGS: tuple[Holding, ...]  # the position is the number of the holding in C

_Arrays = tuple[array[Any] | None, ...]

def program_simulate(
    program: Any,
    costs: _Arrays,
    send: float,
    noise: tuple[float, float, int],  # of units, of messages, seed
    fill: bool,
    steps: tuple[int, bool],
    critical: bool,
    progress: Callable[[int], object],
    /,
) -> tuple[float, float, bytes, bytes, bytes, bytes, tuple[tuple[int, int], ...]]: ...
def fill_in(seconds: _Doubles, given: int, /) -> None: ...
def program_memory(program: Any, held: _Arrays, /) -> bytes: ...
def program_changes(program: Any, held: _Arrays, /) -> bytes: ...
def program_fit(program: Any, held: _Arrays, given: _Arrays, recomputes: bool, moves: bool, /) -> bytes: ...

# ---- attention.c

_KVCache = object  # capsule

def bind_torch(path: str | None = None, /) -> None: ...
def torch_functions() -> tuple[str, ...]: ...
def take_op_failure() -> Exception | None: ...
def in_step() -> bool: ...
def token_offset() -> int: ...
def token_position(index: int, /) -> int: ...
def key_ranges() -> tuple[tuple[tuple[int, int, int], ...], tuple[int, ...], int] | None: ...
def current_unit() -> CurrentUnit | None: ...
def kv_cache_create() -> _KVCache: ...
def kv_cache_bytes(cache: _KVCache, /) -> tuple[int, int]: ...
def kv_cache_layers(cache: object, /) -> list[CacheLayer]: ...
def attention_isa() -> str: ...
def attention_rates(seconds: float, /) -> tuple[float, float]: ...

# ---- cuda.c

_TensorRows = tuple[int, int, int, int] | None  # address, strides of batch, head and row

def cuda_library_open(path: str, /) -> object: ...
def cuda_operation(library: object, name: str, /) -> tuple[str, str, str, tuple[CudaKernel, ...]]: ...

_Attention = tuple[
    str, int, int, int, int, int, int,  # dtype, batch, heads, kv_heads, segment_len, head_dim, q_start
    float, int, float, int, int,  # scale, window, softcap, docs, docs_batch_stride
    _TensorRows, _TensorRows, _TensorRows, _TensorRows, int,  # q, k, v, out, lse
    _TensorRows, _TensorRows, _TensorRows, _TensorRows,  # dout, dq, dk, dv
    _TensorRows, _TensorRows, bool, bool, int,  # own_dk, own_dv, store_kv_grads, deterministic, num_parts
]  # fmt: skip

def cuda_attention_scratch(library: object, operation: str, kernel: int, arguments: _Attention, /) -> int: ...
def cuda_attention(
    library: object,
    operation: str,
    kernel: int,
    arguments: _Attention,
    scratch: int,
    scratch_bytes: int,
    stream: int,
    /,
) -> None: ...
def cuda_attention_parts(
    library: object,
    what: str,
    dtype: str,
    store: bool,
    batch: int,
    heads: int,
    rows: int,
    head_dim: int,
    v_head_dim: int,
    parts: tuple[tuple[int, ...], ...],
    slabs: tuple[tuple[int, ...], ...],
    outs: tuple[tuple[int, ...], ...],
    lse: tuple[int, int, int],
    stream: int,
    /,
) -> bool: ...

# ---- executor.c

def executor_create(
    program: object,
    rank: int,
    group: object,
    cache: object,
    ends: list[object],
    thread_scope: bool,
    dtype_codes: dict[object, int],
    fills: bool,
    leave: Callable[[Sequence[Any]], bool],
    /,
) -> object: ...
def executor_set_device(executor: object, device: object, /) -> None: ...
def executor_set_tier(executor: object, tier: object, /) -> None: ...
def executor_step(
    executor: object,
    step: int,
    training: bool,
    sequence_length: int,
    sizes: _Ints,
    run: Callable[[int, int, int, tuple[Any, ...] | None], Any],  # pass, stage, cell, what came
    fill: Callable[[int, int], bool] | None,  # stage, cell
    segment_sizes: Callable[[int], _Ints],
    make_views: Callable[[object, int, Sequence[tuple[int, int, tuple[int, ...], int]]], Any],
    part_sizes: _Ints | None = None,  # siblings in one unit: tokens of each, those of one column after another
    first_part: _Ints | None = None,  # of each column, and behind the last their count; empty with none
    /,
) -> None: ...
def executor_last_unit(executor: object, /) -> _Unit: ...
def executor_timeline(
    executor: object, rank: int, /
) -> list[tuple[int, _Unit, int, int]]: ...  # opcode, unit, start, end
def executor_settle(executor: object, /) -> bool: ...
def executor_fills(executor: object, /) -> list[tuple[_Unit, int, int]]: ...
def executor_stage_measure(executor: object, stage: int, /) -> tuple[int, int]: ...
def unit_state() -> Any: ...
def unit_set_state(state: object, /) -> None: ...
def unit_set_whole() -> None: ...
def unit_set_documents(count: int, /) -> None: ...

# ---- tier.c

def file_tier(directory: str | bytes, /) -> object: ...
def host_tier(device: object, check_host: Callable[[int], None], /) -> object: ...
def tier_begin_step(tier: object, most_loads: int, /) -> None: ...
def tier_out(tier: object, load: int, parts: _Ints, /) -> None: ...  # address and bytes of each
def tier_in(tier: object, load: int, parts: _Ints, /) -> None: ...
def tier_wait(tier: object, group: object, load: int, /) -> None: ...
def tier_reset(tier: object, /) -> None: ...
def tier_facts(tier: object, /) -> TierFacts: ...
def tier_step(tier: object, /) -> TierFacts: ...
