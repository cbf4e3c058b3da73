/* replay.c - runs a target on files, one after the other, in place of libFuzzer: for compilers without it. */
#include "fuzz.h"

int main(int count, char **names)
{
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(names[i], "rb");
        if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
            perror(names[i]);
            return 2;
        }
        long size = ftell(file);
        rewind(file);
        /* exactly as long as the input, so that a read behind it is found */
        uint8_t *data = malloc(size > 0 ? (size_t)size : 1);
        if (data == NULL || fread(data, 1, (size_t)size, file) != (size_t)size) {
            perror(names[i]);
            return 2;
        }
        fclose(file);
        fprintf(stderr, "%s\n", names[i]); /* the last name is that of the input that fails */
        LLVMFuzzerTestOneInput(data, (size_t)size);
        free(data);
    }
    return 0;
}
