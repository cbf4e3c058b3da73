/* fuzz_message.c - does a corrupted header in a place end in an error, never in a read outside the place, and is no
 * message taken for another one?
 *
 * Rank 0 sends rank 1 the activations of two segments over an arena that both map. Then the input overwrites parts of
 * the two headers, as a peer could that runs other code, and the executor of rank 1 walks its step on them. Whatever
 * it hands to a unit is read as its header says. The arena ends with the last place: a read behind it is found. */
#include "fuzz.h"

#include "core/lower.h"
#include "run/arena.h"
#include "run/executor.h"

enum { NUM_SEGMENTS = 2, NUM_EDGES = 2, PAGE_BYTES = 65536, SEQUENCE = 24, ROW_BYTES = 40, MOST_EDITS = 6 };

typedef struct {
    s1f_program *program;
    void *block;
    char *arenas[NUM_EDGES];
    s1f_group *groups[2];
    s1f_edge_end *ends[2][NUM_EDGES]; /* [rank] */
    s1f_kv_cache *cache;
    s1f_executor *executor;       /* of rank 1 */
    int32_t incoming;             /* edge */
    int32_t places[NUM_SEGMENTS]; /* by sequence */
    int64_t step;
    int64_t num_run;
} pipeline;

static int64_t size_of_segment(int32_t segment)
{
    return segment == 0 ? 10 : SEQUENCE - 10;
}

/* -- rank 1 -------------------------------------------------------------------------------------------------------- */

static volatile char read_byte;

/* Reads what a stage would: sizes as many as ndim says, data as long as the sizes say. */
static void read_message(const s1f_input *input)
{
    const s1f_message *message = input->message;
    REQUIRE(message->num_tensors >= 0 && message->num_tensors <= S1F_MAX_TENSORS && !message->on_device);
    for (int32_t i = 0; i < message->num_tensors; i++) {
        const s1f_tensor_header *tensor = &message->tensors[i];
        REQUIRE(tensor->ndim >= 0 && tensor->ndim <= S1F_MAX_DIMS);
        if (tensor->flags & S1F_TENSOR_NONE)
            continue;
        __int128 bytes = s1f_dtype_bytes(tensor->dtype);
        REQUIRE(bytes > 0);
        for (int32_t d = 0; d < tensor->ndim; d++) {
            REQUIRE(tensor->sizes[d] >= 0);
            bytes *= tensor->sizes[d];
        }
        REQUIRE(bytes == tensor->bytes && tensor->bytes <= PAGE_BYTES);
        const char *data = (const char *)input->payload + tensor->offset;
        if (bytes > 0)
            read_byte = (char)(data[0] + data[bytes - 1]);
    }
}

static s1f_status run(void *context, const s1f_current_unit *unit, const s1f_input *inputs, int32_t num_inputs,
                      int32_t num_sends, s1f_result *result)
{
    static const char row[ROW_BYTES];
    pipeline *p = context;
    p->num_run++;
    REQUIRE(unit->sequence_length >= 1 && unit->length >= 1);
    for (int32_t i = 0; i < num_inputs; i++)
        read_message(&inputs[i]);
    if (num_sends > 0) {
        result->num_tensors = 1;
        result->tensors[0] = (s1f_tensor_header){.dtype = S1F_INT8, .ndim = 1, .sizes = {ROW_BYTES}};
        result->data[0] = row;
    }
    return S1F_OK;
}

static void release(void *context, void *keep)
{
    (void)context;
    (void)keep;
}

/* As an engine does that is told sizes for its own length only. */
static s1f_status segment_sizes(void *context, int64_t sequence_length, int64_t *sizes)
{
    (void)context;
    if (sequence_length < NUM_SEGMENTS)
        return s1f_fail(S1F_ERR_ARG, "%lld tokens are too few", (long long)sequence_length);
    sizes[0] = sequence_length == SEQUENCE ? size_of_segment(0) : 1;
    sizes[1] = sequence_length - sizes[0];
    return S1F_OK;
}

/* -- the pipeline, made once --------------------------------------------------------------------------------------- */

static void make_edge(pipeline *p, int32_t e, const s1f_edge *edge)
{
    int64_t bytes = PAGE_BYTES * (1 + (int64_t)edge->num_places);
    p->arenas[e] = aligned_alloc(PAGE_BYTES, (size_t)bytes);
    memset(p->arenas[e], 0, (size_t)bytes);
    for (int32_t rank = 0; rank < 2; rank++)
        REQUIRE(s1f_arena_end_create(p->groups[rank], p->arenas[e], bytes, -1, 1 - rank, edge->destination_rank == rank,
                                     "edge", &p->ends[rank][e]) == S1F_OK);
    if (edge->destination_rank == 1)
        p->incoming = e;
}

static pipeline *make_pipeline(void)
{
    static pipeline made;
    static s1f_schedule *schedule; /* the program borrows it */
    REQUIRE(s1f_schedule_build("seq1f1b", 2, 1, NUM_SEGMENTS, 1, NULL, &schedule) == S1F_OK);
    REQUIRE(s1f_schedule_lower(schedule, (s1f_places){.prefetch = 1}, S1F_ALL_RANKS, &made.program) == S1F_OK);
    size_t block_bytes = (s1f_group_block_bytes(2) + 63) / 64 * 64;
    made.block = aligned_alloc(64, block_bytes);
    memset(made.block, 0, block_bytes);
    for (int32_t rank = 0; rank < 2; rank++) {
        REQUIRE(s1f_group_create(made.block, 2, rank, &made.groups[rank]) == S1F_OK);
        s1f_group_set_limits(made.groups[rank], 0, 0); /* nothing is to wait: what does, fails */
    }
    int32_t num_edges;
    const s1f_edge *edges = s1f_program_edges(made.program, &num_edges);
    REQUIRE(num_edges == NUM_EDGES);
    for (int32_t e = 0; e < NUM_EDGES; e++)
        make_edge(&made, e, &edges[e]);
    int64_t count;
    const s1f_instruction *instructions = s1f_program_instructions(made.program, 1, &count);
    for (int64_t i = 0; i < count; i++)
        if (instructions[i].opcode == S1F_OP_WAIT)
            made.places[instructions[i].sequence] = instructions[i].place;
    s1f_compute compute = {.context = &made, .run = run, .release = release, .segment_sizes = segment_sizes};
    REQUIRE(s1f_kv_cache_create(&made.cache) == S1F_OK);
    REQUIRE(s1f_executor_create(made.program, 1, made.groups[1], made.cache, made.ends[1], 1, &compute,
                                &made.executor) == S1F_OK);
    return &made;
}

/* -- one input ----------------------------------------------------------------------------------------------------- */

static void send_forward(pipeline *p, int32_t segment)
{
    static char data[SEQUENCE * ROW_BYTES];
    const void *const tensors[2] = {data, NULL};
    s1f_message message = {.step = p->step,
                           .destination_stage = 1,
                           .segment = segment,
                           .training = 1,
                           .sequence_length = SEQUENCE,
                           .offset = segment == 0 ? 0 : size_of_segment(0),
                           .length = size_of_segment(segment),
                           .num_tensors = 2};
    message.tensors[0] = (s1f_tensor_header){
        .dtype = S1F_FLOAT32, .flags = S1F_TENSOR_REQUIRES_GRAD, .ndim = 2, .sizes = {message.length, ROW_BYTES / 4}};
    message.tensors[1] = (s1f_tensor_header){.flags = S1F_TENSOR_NONE};
    REQUIRE(s1f_p2p_send(p->ends[0][p->incoming], segment, p->places[segment], &message, tensors) == S1F_OK);
}

/* The checksum of a peer that runs other code is right. */
static void seal(s1f_message *header)
{
    uint32_t magic = header->magic, version = header->version;
    if (header->num_tensors >= 0 && header->num_tensors <= S1F_MAX_TENSORS)
        s1f_message_seal(header);
    header->magic = magic;
    header->version = version;
}

/* Overwrites a field, mostly one of those that say where something lies. */
static void corrupt(fuzz_input *in, s1f_message *header)
{
    enum { OTHERS = sizeof *header - sizeof header->checksum, HEAD = OTHERS - sizeof header->tensors };
    static const int64_t values[] = {-1, 0,     1,     2,     8,         9,         16,        17,
                                     64, 63488, 63489, 65536, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
    size_t at = take_bits(in, 1) % 2 == 0 ? take_bits(in, 2) % OTHERS / 4 * 4 : take_bits(in, 1) % (HEAD / 4) * 4;
    uint8_t how = (uint8_t)take_bits(in, 1);
    size_t bytes = how & 1 ? 4 : 8;
    int64_t value = how & 2 ? values[how / 4 % (sizeof values / sizeof *values)] : (int64_t)take_bits(in, bytes);
    if (at >= offsetof(s1f_message, checksum))
        at += sizeof header->checksum;
    if (at + bytes <= sizeof *header)
        memcpy((char *)header + at, &value, bytes);
}

/* Another pass may make the same. */
static int names_the_same(const s1f_message *one, const s1f_message *other)
{
    return one->step == other->step && one->sequence == other->sequence && one->source_stage == other->source_stage &&
           one->destination_stage == other->destination_stage && one->microbatch == other->microbatch &&
           one->segment == other->segment && one->training == other->training;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static pipeline *p;
    fuzz_input in = {data, size};
    if (p == NULL)
        p = make_pipeline();
    p->step++;
    p->num_run = 0;
    int32_t num_edges;
    const s1f_edge *edges = s1f_program_edges(p->program, &num_edges);
    for (int32_t rank = 0; rank < 2; rank++)
        s1f_group_begin_step(p->groups[rank], p->step);
    for (int32_t e = 0; e < NUM_EDGES; e++) {
        atomic_store(&((s1f_signal *)p->arenas[e])->position, UINT64_MAX); /* the credits: a sender never waits */
        REQUIRE(s1f_p2p_begin_step(p->ends[0][e], edges[e].num_places) == S1F_OK);
    }
    s1f_message *headers[NUM_SEGMENTS], sent[NUM_SEGMENTS];
    for (int32_t segment = 0; segment < NUM_SEGMENTS; segment++) {
        send_forward(p, segment);
        headers[segment] = s1f_arena_place(p->ends[0][p->incoming], p->places[segment]);
        sent[segment] = *headers[segment];
    }
    for (int i = 0; i < MOST_EDITS && in.left > 0; i++)
        corrupt(&in, headers[take_below(&in, NUM_SEGMENTS)]);
    int are_as_sent = 1;
    for (int32_t segment = 0; segment < NUM_SEGMENTS; segment++) {
        are_as_sent &= names_the_same(headers[segment], &sent[segment]);
        seal(headers[segment]);
        REQUIRE(s1f_message_payload_bytes(headers[segment]) >= -1); /* what a relay looks at first */
    }
    int learns = (int)take_below(&in, 2);
    int64_t sizes[NUM_SEGMENTS] = {size_of_segment(0), size_of_segment(1)};
    s1f_status status = s1f_executor_step(p->executor, p->step, 1, learns ? 0 : SEQUENCE, learns ? NULL : sizes, NULL);
    if (status == S1F_OK)
        REQUIRE(p->num_run == 2 * NUM_SEGMENTS && are_as_sent);
    else
        REQUIRE((status == S1F_ERR_ARG || status == S1F_ERR_STATE) && s1f_last_error()[0] != '\0');
    REQUIRE(!s1f_group_has_failed(p->groups[1])); /* nobody waited */
    return 0;
}
