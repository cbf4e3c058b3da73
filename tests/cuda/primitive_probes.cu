/* primitive_probes.cu - each primitive of sm80_primitives.cuh alone, on words that the caller chose.
 *
 * Warp w of the launch reads the words in[w][lane][0..15] and writes out[w][lane][0..15]; `probe` names the primitive.
 * tests/cuda/probes.py says what must come out. Of the library that benchmarks/gpu.py takes along, not of the one that
 * is installed. */
#include "../../csrc/core/dtype.h"
#include "../../kernels/cuda/kernel_table.h"
#include "../../kernels/cuda/sm80_primitives.cuh"

namespace s1f
{

enum probe : int32_t { /* as in probes.py */
                       LOAD_MATRICES,
                       LOAD_MATRICES_TRANSPOSED,
                       MULTIPLY_BF16,
                       MULTIPLY_FP16,
                       COPY_ASYNC,
                       SHUFFLE_XOR,
                       SHUFFLE,
                       BALLOT,
                       EXP2,
                       LOG2,
                       RECIPROCAL,
                       PACK_BF16,
                       PACK_FP16,
                       UNPACK_BF16,
                       UNPACK_FP16,
                       GLOBAL_ADD,
                       GLOBAL_ADD_4,
                       GLOBAL_LOAD_4,
                       SHARED_LOAD_PAIR,
                       MAXIMUM,
};

enum { WORDS = 16 }; /* of a lane */

static S1F_BOTH float as_float(uint32_t word)
{
    union {
        uint32_t word;
        float number;
    } u = {word};
    return u.number;
}

static S1F_BOTH uint32_t as_word(float number)
{
    union {
        float number;
        uint32_t word;
    } u = {number};
    return u.word;
}

struct primitive_probes {
    struct arguments {
        const uint32_t *in;
        uint32_t *out;
        int32_t probe, num_warps;
    };
    static constexpr int THREADS = WARP_SIZE, BLOCKS_PER_SM = 1;
    static constexpr int SHARED_BYTES = WARP_SIZE * CHUNK_BYTES;

    static S1F_DEVICE void run(const arguments &a)
    {
        const int lane = thread_index();
        const uint32_t *in = a.in + (block_index().x * WARP_SIZE + lane) * WORDS;
        uint32_t *out = a.out + (block_index().x * WARP_SIZE + lane) * WORDS;
        uint32_t x[WORDS], y[WORDS] = {};
        S1F_UNROLL
        for (int i = 0; i < WORDS; i++)
            x[i] = global_load(in + i);
        const uint32_t own = shared_base() + (uint32_t)lane * CHUNK_BYTES;

        switch (a.probe) {
        case LOAD_MATRICES:
        case LOAD_MATRICES_TRANSPOSED: { /* lane l's words 0..3 are row l % 8 of matrix l / 8 */
            shared_store_16(own, chunk{{x[0], x[1], x[2], x[3]}});
            warp_barrier();
            uint32_t r[4];
            if (a.probe == LOAD_MATRICES)
                load_matrices(r, own);
            else
                load_matrices_transposed(r, own);
            for (int i = 0; i < 4; i++)
                y[i] = r[i];
            break;
        }
        case MULTIPLY_BF16:
        case MULTIPLY_FP16: { /* words 0..3 A, 4 and 5 B, 6..9 the sums before */
            const uint32_t matrix[4] = {x[0], x[1], x[2], x[3]};
            float sums[4] = {as_float(x[6]), as_float(x[7]), as_float(x[8]), as_float(x[9])};
            if (a.probe == MULTIPLY_BF16)
                matrix_multiply_add<bf16>(sums, matrix, x[4], x[5]);
            else
                matrix_multiply_add<fp16>(sums, matrix, x[4], x[5]);
            for (int i = 0; i < 4; i++)
                y[i] = as_word(sums[i]);
            break;
        }
        case COPY_ASYNC: { /* words 0..3, where word 4 is not 0; zeros elsewhere, whatever lay there */
            shared_store_16(own, chunk{{x[8], x[9], x[10], x[11]}});
            warp_barrier();
            copy_async_16(own, in, x[4] != 0);
            copy_async_commit();
            copy_async_wait<0>();
            warp_barrier();
            const chunk got = shared_load_16(own);
            for (int i = 0; i < 4; i++)
                y[i] = got.word[i];
            break;
        }
        case GLOBAL_ADD: /* all lanes to lane 0's word 0, which was 0 */
            global_add((float *)(a.out + block_index().x * WARP_SIZE * WORDS), as_float(x[0]));
            return;
        case GLOBAL_ADD_4: { /* of all warps, to the first words of all; GLOBAL_LOAD_4: what these hold of a lane */
            const float values[4] = {as_float(x[0]), as_float(x[1]), as_float(x[2]), as_float(x[3])};
            global_add_4<WARP_SIZE>((float *)a.out, values);
            return;
        }
        case GLOBAL_LOAD_4: {
            float values[4];
            global_load_4<WARP_SIZE>(values, (const float *)a.in);
            for (int i = 0; i < 4; i++)
                y[i] = as_word(values[i]);
            break;
        }
        case SHARED_LOAD_PAIR: { /* words 2 and 3 of lane word 4 */
            shared_store_16(own, chunk{{x[0], x[1], x[2], x[3]}});
            warp_barrier();
            const float_pair pair = shared_load_pair(shared_base() + x[4] * CHUNK_BYTES + 8);
            y[0] = as_word(pair.element[0]);
            y[1] = as_word(pair.element[1]);
            break;
        }
        default: without_memory(a.probe, x, y);
        }
        for (int i = 0; i < WORDS; i++)
            global_store(out + i, y[i]);
    }

    /* Primitives that only compute, or exchange words between the lanes of a warp. */
    static S1F_DEVICE void without_memory(int probe, const uint32_t (&x)[WORDS], uint32_t (&y)[WORDS])
    {
        switch (probe) {
        case SHUFFLE_XOR: /* word 1 as mask, alike in all lanes */
            y[0] = as_word(shuffle_xor(as_float(x[0]), (int)x[1]));
            break;
        case SHUFFLE: /* from lane word 1 */ y[0] = as_word(shuffle(as_float(x[0]), (int)x[1])); break;
        case BALLOT:
            y[0] = warp_ballot(x[0] != 0);
            y[1] = y[0] != 0 ? (uint32_t)lowest_bit(y[0]) : 0;
            break;
        case EXP2:
            for (int i = 0; i < WORDS; i++)
                y[i] = as_word(exp2_fast(as_float(x[i])));
            break;
        case LOG2:
            for (int i = 0; i < WORDS; i++)
                y[i] = as_word(log2_fast(as_float(x[i])));
            break;
        case RECIPROCAL:
            for (int i = 0; i < WORDS; i++)
                y[i] = as_word(reciprocal_fast(as_float(x[i])));
            break;
        case PACK_BF16:
            for (int i = 0; i < WORDS; i += 2)
                y[i] = pack<bf16>(as_float(x[i]), as_float(x[i + 1]));
            break;
        case PACK_FP16:
            for (int i = 0; i < WORDS; i += 2)
                y[i] = pack<fp16>(as_float(x[i]), as_float(x[i + 1]));
            break;
        case UNPACK_BF16:
        case UNPACK_FP16:
            for (int i = 0; i < WORDS; i += 2) {
                float first, second;
                if (probe == UNPACK_BF16)
                    unpack<bf16>(x[i], first, second);
                else
                    unpack<fp16>(x[i], first, second);
                y[i] = as_word(first);
                y[i + 1] = as_word(second);
            }
            break;
        case MAXIMUM: y[0] = as_word(maximum(as_float(x[0]), as_float(x[1]))); break;
        }
    }
};

} // namespace s1f

S1F_KERNEL(s1f_primitive_probes, s1f::primitive_probes)

static const s1f_cuda_kernel kernels[] = {
    {"s1f_primitive_probes", S1F_BFLOAT16, 0, 0, 0, 1, 0, 0, s1f::primitive_probes::SHARED_BYTES,
     S1F_CUDA_SHARED_99_KB},
};

static int64_t scratch_bytes(const void *arguments, int32_t kernel)
{
    (void)arguments, (void)kernel;
    return 0;
}

static int32_t launch_probe(const void *arguments, int32_t kernel, void *stream)
{
    (void)kernel;
    const s1f::primitive_probes::arguments &a = *(const s1f::primitive_probes::arguments *)arguments;
    return s1f::launch(s1f_primitive_probes, {a.num_warps, 1, 1}, s1f::primitive_probes::THREADS,
                       s1f::primitive_probes::SHARED_BYTES, a, stream);
}

S1F_CUDA_OPERATION(primitive_probes, kernels, scratch_bytes, launch_probe, s1f::error_text);
