/* fuzz_order_csv.c - is any CSV an order, or an error that says where it is wrong? The number of segments comes first. */
#include "order.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    int32_t num_segments = take_int32(&in);
    char *text = malloc(in.left + 1);
    if (in.left > 0)
        memcpy(text, in.at, in.left);
    text[in.left] = '\0';
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_from_csv(text, num_segments, &schedule);
    if (status == S1F_OK) {
        REQUIRE(s1f_schedule_num_segments(schedule) == num_segments);
        require_order_is_sound(schedule, 1);
    } else {
        REQUIRE_REFUSED(status);
        REQUIRE(schedule == NULL);
    }
    s1f_schedule_free(schedule);
    free(text);
    return 0;
}
