/* fuzz_order_text.c - is any text an order, or an error that says where it is wrong? */
#include "order.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    memcpy(text, data, size);
    text[size] = '\0';
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_from_text(text, 0, &schedule);
    if (status == S1F_OK) {
        require_text_reads_back(schedule);
        require_order_is_sound(schedule, 1);
    } else {
        REQUIRE_REFUSED(status);
        REQUIRE(schedule == NULL);
    }
    s1f_schedule_free(schedule);
    free(text);
    return 0;
}
