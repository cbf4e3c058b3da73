/* p2p.c - what all transports share: building, checking and naming messages. */
#include "p2p.h"

#include "../core/schedule.h"

#include <stdio.h>
#include <string.h>

static const uint32_t MESSAGE_MAGIC = UINT32_C(0x31463153); /* "S1F1" */
enum { MESSAGE_VERSION = 2 };

static s1f_status on_edge(s1f_status status, const s1f_edge_end *end, int64_t sequence)
{
    /* The group's own errors name rank, edge and message; a Python exception has no text here. */
    if (status == S1F_OK || status == S1F_ERR_PEER || status == S1F_ERR_TIMEOUT || status == S1F_ERR_PYTHON)
        return status;
    if (sequence < 0)
        return s1f_fail_prefixed(status, "%s: ", end->text);
    return s1f_fail_prefixed(status, "%s, message %lld: ", end->text, (long long)sequence);
}

/* Bytes of tensor i, by its sizes. Fails with `refusal` where its header makes no sense. */
static s1f_status tensor_bytes(const s1f_message *message, int32_t i, s1f_status refusal, int64_t *bytes)
{
    const s1f_tensor_header *tensor = &message->tensors[i];
    int is_none = tensor->flags & S1F_TENSOR_NONE;
    *bytes = is_none ? 0 : s1f_dtype_bytes(tensor->dtype);
    int is_sound = tensor->ndim >= 0 && tensor->ndim <= S1F_MAX_DIMS && (is_none || *bytes > 0);
    for (int32_t d = 0; is_sound && !is_none && d < tensor->ndim; d++)
        is_sound = tensor->sizes[d] >= 0 && !__builtin_mul_overflow(*bytes, tensor->sizes[d], bytes);
    if (is_sound)
        return S1F_OK;
    return s1f_fail(refusal, "tensor %d has dtype %s and %d dimensions (at most %d), or a negative size", (int)i,
                    s1f_dtype_name(tensor->dtype), (int)tensor->ndim, (int)S1F_MAX_DIMS);
}

static int64_t round_up(int64_t bytes, int64_t to)
{
    return (bytes + to - 1) / to * to;
}

/* Lays the tensors out one behind the other. */
static s1f_status lay_out(s1f_message *message)
{
    if (message->num_tensors < 0 || message->num_tensors > S1F_MAX_TENSORS)
        return s1f_fail(S1F_ERR_ARG, "%d tensors, a message holds 0 to %d", (int)message->num_tensors,
                        (int)S1F_MAX_TENSORS);
    int64_t end = 0;
    for (int32_t i = 0; i < message->num_tensors; i++) {
        s1f_tensor_header *tensor = &message->tensors[i];
        S1F_TRY(tensor_bytes(message, i, S1F_ERR_ARG, &tensor->bytes));
        tensor->offset = round_up(end, S1F_PAYLOAD_ALIGNMENT);
        if (__builtin_add_overflow(tensor->offset, tensor->bytes, &end) || end > INT64_MAX / 2)
            return s1f_fail(S1F_ERR_ARG, "the tensors are larger than memory can be");
    }
    message->payload_bytes = end;
    return S1F_OK;
}

int64_t s1f_message_payload_bytes(const void *place)
{
    const s1f_message *message = place;
    if (message->magic != MESSAGE_MAGIC || message->version != MESSAGE_VERSION || message->payload_bytes < 0)
        return -1;
    return message->on_device ? 0 : message->payload_bytes;
}

/* "F1.0 of step 7 (train), stage 0 to 1, message 5" */
static void message_text(const s1f_message *message, char *text, size_t bytes)
{
    char unit[32];
    s1f_unit_text((s1f_unit){message->pass, message->source_stage, message->microbatch, message->segment}, 0, unit,
                  sizeof unit);
    snprintf(text, bytes, "%s of step %lld (%s), stage %d to %d, message %lld", unit, (long long)message->step,
             message->training ? "train" : "eval", (int)message->source_stage, (int)message->destination_stage,
             (long long)message->sequence);
}

/* FNV-1a over 64-bit words of what follows the checksum, as far as the header is used. */
static uint64_t checksum_of(const s1f_message *message)
{
    const char *at = (const char *)&message->step, *end = (const char *)&message->tensors[message->num_tensors];
    uint64_t sum = UINT64_C(0xcbf29ce484222325);
    for (; at < end; at += sizeof sum) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        sum = (sum ^ word) * UINT64_C(0x100000001b3);
    }
    return sum;
}

_Static_assert(offsetof(s1f_message, step) % sizeof(uint64_t) == 0 &&
                   offsetof(s1f_message, tensors) % sizeof(uint64_t) == 0 &&
                   sizeof(s1f_tensor_header) % sizeof(uint64_t) == 0,
               "a header is whole words");

void s1f_message_seal(s1f_message *message)
{
    message->magic = MESSAGE_MAGIC;
    message->version = MESSAGE_VERSION;
    message->checksum = checksum_of(message);
}

/* A message that a reader may follow: every tensor lies within the payload. */
s1f_status s1f_message_check_sound(const s1f_message *message, int64_t sequence)
{
    if (message->magic != MESSAGE_MAGIC || message->version != MESSAGE_VERSION)
        return s1f_fail(S1F_ERR_STATE, "not a message of this version of seq1f1b (magic %08x, version %u)",
                        (unsigned)message->magic, (unsigned)message->version);
    if (message->num_tensors < 0 || message->num_tensors > S1F_MAX_TENSORS || message->payload_bytes < 0)
        return s1f_fail(S1F_ERR_STATE, "its header holds %d tensors in %lld bytes", (int)message->num_tensors,
                        (long long)message->payload_bytes);
    if (message->checksum != checksum_of(message))
        return s1f_fail(S1F_ERR_STATE, "its header is not as it was sent (checksum %016llx, found %016llx)",
                        (unsigned long long)message->checksum, (unsigned long long)checksum_of(message));
    if (message->sequence != sequence) {
        char got[160];
        message_text(message, got, sizeof got);
        return s1f_fail(S1F_ERR_STATE, "found %s instead: do all ranks run the same schedule?", got);
    }
    for (int32_t i = 0; i < message->num_tensors; i++) {
        const s1f_tensor_header *tensor = &message->tensors[i];
        int64_t end, bytes;
        S1F_TRY(tensor_bytes(message, i, S1F_ERR_STATE, &bytes));
        if (tensor->bytes != bytes || tensor->offset < 0 || tensor->offset % S1F_PAYLOAD_ALIGNMENT != 0 ||
            __builtin_add_overflow(tensor->offset, tensor->bytes, &end) || end > message->payload_bytes)
            return s1f_fail(S1F_ERR_STATE, "tensor %d lies at bytes %lld + %lld of a payload of %lld", (int)i,
                            (long long)tensor->offset, (long long)tensor->bytes, (long long)message->payload_bytes);
    }
    return S1F_OK;
}

s1f_status s1f_p2p_begin_step(s1f_edge_end *end, int32_t num_places)
{
    if (num_places < 1)
        return s1f_fail(S1F_ERR_ARG, "%s: %d places, at least 1 is needed", end->text, (int)num_places);
    return end->transport->begin_step(end, num_places);
}

s1f_status s1f_p2p_post(s1f_edge_end *end, int64_t sequence, int32_t place)
{
    return on_edge(end->transport->post(end, sequence, place), end, sequence);
}

s1f_status s1f_p2p_receive(s1f_edge_end *end, int64_t sequence, int32_t place)
{
    if (end->transport->receive == NULL)
        return S1F_OK;
    return on_edge(end->transport->receive(end, sequence, place), end, sequence);
}

s1f_status s1f_p2p_wait(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message **message,
                        const void **payload)
{
    const s1f_message *found;
    const void *found_payload;
    s1f_status status = end->transport->wait(end, sequence, place, &found, &found_payload);
    if (status == S1F_OK && (status = s1f_message_check_sound(found, sequence)) == S1F_OK && found->on_device &&
        !end->transport->is_between_gpus)
        status = s1f_fail(S1F_ERR_STATE, "its payload is in a GPU's memory: do all ranks compute on a GPU?");
    if (status == S1F_OK) {
        *message = found;
        *payload = found_payload;
    }
    return on_edge(status, end, sequence);
}

int s1f_p2p_has_come(s1f_edge_end *end, int64_t sequence)
{
    return end->transport->has_come == NULL || end->transport->has_come(end, sequence) ||
           s1f_group_has_failed(end->group);
}

s1f_status s1f_p2p_send(s1f_edge_end *end, int64_t sequence, int32_t place, s1f_message *message,
                        const void *const *tensors)
{
    message->sequence = sequence;
    s1f_status status = lay_out(message);
    if (status == S1F_OK) {
        s1f_message_seal(message);
        status = end->transport->send(end, sequence, place, message, tensors);
    }
    return on_edge(status, end, sequence);
}

s1f_status s1f_p2p_count_sent(s1f_edge_end *end, int64_t *count)
{
    *count = INT64_MAX;
    return end->transport->count_sent == NULL ? S1F_OK : on_edge(end->transport->count_sent(end, count), end, -1);
}

s1f_status s1f_p2p_finish(s1f_edge_end *end, int32_t failed)
{
    return end->transport->finish == NULL ? S1F_OK : on_edge(end->transport->finish(end, failed), end, -1);
}

void s1f_edge_end_free(s1f_edge_end *end)
{
    if (end != NULL)
        end->transport->free(end);
}

s1f_wait_reason s1f_edge_reason(const s1f_edge_end *end, const char *purpose, int64_t sequence)
{
    return (s1f_wait_reason){.peer_rank = end->peer_rank,
                             .hangup_fd = end->hangup_fd,
                             .purpose = purpose,
                             .edge = end->text,
                             .sequence = sequence};
}

/* A stage may give its input's gradient by B and its neighbour by I: both make it. */
static int carries_alike(const s1f_message *message, const s1f_message *other)
{
    return (s1f_pass_products(message->pass) & s1f_pass_products(other->pass)) != 0;
}

s1f_status s1f_message_check(const s1f_message *message, const s1f_message *expected)
{
    if (message->step == expected->step && message->sequence == expected->sequence &&
        message->source_stage == expected->source_stage && message->destination_stage == expected->destination_stage &&
        carries_alike(message, expected) && message->microbatch == expected->microbatch &&
        message->segment == expected->segment && message->training == expected->training)
        return S1F_OK;
    char got[160], wanted[160];
    message_text(message, got, sizeof got);
    message_text(expected, wanted, sizeof wanted);
    return s1f_fail(S1F_ERR_STATE, "received %s, but the program expects %s: do all ranks run the same schedule?", got,
                    wanted);
}
