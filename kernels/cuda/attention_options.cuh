/* attention_options.cuh - what becomes of a product q . k: its exponent, and whether the query sees the key at all; and
 * which blocks of keys a tile of queries need not look at.
 *
 *   p = 2^(x - lse log2 e),  x = factor q.k  or  cap tanh(inner q.k),  factor = scale log2 e
 *   token t sees key j:  j <= t,  t - j < window,  docs[j] == docs[t]
 *
 * Documents are ids per token, in any order. A kernel that is launched before finds the lowest and highest id of each
 * block of keys; a tile skips the blocks whose range does not meet its own. */
#ifndef S1F_CUDA_ATTENTION_OPTIONS_CUH
#define S1F_CUDA_ATTENTION_OPTIONS_CUH

#include "attention_arguments.h"
#include "sm80_primitives.cuh"

namespace s1f
{

#define S1F_INFINITY __builtin_huge_valf()
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;

struct alignas(8) id_range {
    int32_t low, high;
};

struct attention_options {    /* of a launch */
    float factor, cap, inner; /* cap 0: none. With a cap, scores are exponents and the factor is 1 */
    int32_t num_tokens;       /* T: keys, and one more than the position of the last query */
    int32_t window;           /* NO_WINDOW: none */
    const int32_t *docs;      /* (B, T); NULL: one document */
    int64_t docs_batch_stride;
    const id_range *ranges; /* (B, blocks of keys); NULL without documents */
};

enum : int32_t { NO_WINDOW = INT32_MAX };

inline attention_options options_of(const s1f_cuda_attention &args, const id_range *ranges)
{
    attention_options options = {};
    const double log2_e = 1.44269504088896340736;
    options.num_tokens = (int32_t)(args.q_start + args.segment_len);
    options.window = args.window > 0 && args.window < options.num_tokens ? (int32_t)args.window : NO_WINDOW;
    options.factor = (float)(args.scale * log2_e);
    if (args.softcap > 0) {
        options.factor = 1;
        options.cap = (float)(args.softcap * log2_e);
        options.inner = (float)(args.scale / args.softcap);
    }
    options.docs = args.docs;
    options.docs_batch_stride = args.docs_batch_stride;
    options.ranges = ranges;
    return options;
}

/* tanh by 1 - 2 / (1 + e^2x), absolute error below 2^-20; tanh.approx is off by 2^-11. */
S1F_DEVICE float tanh_fast(float x)
{
    return 1 - 2 * reciprocal_fast(1 + exp2_fast(x * (2 * LOG2_E)));
}

struct visibility { /* of a batch entry */
    int32_t num_tokens, window;
    const int32_t *docs;
    const id_range *ranges;
};

S1F_DEVICE visibility visibility_of(const attention_options &options, int batch, int block_keys)
{
    visibility rule = {options.num_tokens, options.window, nullptr, nullptr};
    if (options.docs != nullptr) {
        const int num_blocks = (options.num_tokens + block_keys - 1) / block_keys;
        rule.docs = options.docs + batch * options.docs_batch_stride;
        rule.ranges = options.ranges + batch * (int64_t)num_blocks;
    }
    return rule;
}

/* Tells whether a token sees a key, documents aside. */
S1F_DEVICE bool sees(const visibility &rule, int token, int key)
{
    return (uint32_t)(token - key) < (uint32_t)rule.window;
}

S1F_DEVICE int32_t document_of(const visibility &rule, int token)
{
    return rule.docs != nullptr && token < rule.num_tokens ? global_load(rule.docs + token) : 0;
}

S1F_DEVICE bool overlap(const id_range &a, const id_range &b)
{
    return a.low <= b.high && b.low <= a.high;
}

/* Blocks of KEYS keys as the queries of tokens [first_token, last_token] see them. */
template <int KEYS> struct seen_blocks {
    visibility rule;
    int first_token, last_token;
    int begin, end;   /* by causality and window */
    id_range queries; /* documents of the queries; of whole blocks that hold them, so perhaps wider */

    S1F_DEVICE seen_blocks(const visibility &r, int first, int last) : rule(r), first_token(first), last_token(last)
    {
        const int first_key = first_token - rule.window + 1;
        begin = first_key > 0 ? first_key / KEYS : 0;
        end = last_token / KEYS + 1;
        queries = {INT32_MAX, INT32_MIN};
        for (int block = first_token / KEYS; rule.docs != nullptr && block < end; block++) {
            const id_range ids = global_load(rule.ranges + block);
            queries.low = ids.low < queries.low ? ids.low : queries.low;
            queries.high = ids.high > queries.high ? ids.high : queries.high;
        }
    }

    /* The first block from `block` on that is to be looked at; end: none. All lanes of a warp ask alike. */
    S1F_DEVICE int next(int block) const
    {
        if (rule.docs == nullptr)
            return block;
        const int lane = thread_index() % WARP_SIZE;
        for (; block < end; block += WARP_SIZE) {
            const bool seen = block + lane < end && overlap(queries, global_load(rule.ranges + block + lane));
            const uint32_t lanes = warp_ballot(seen);
            if (lanes != 0)
                return block + lowest_bit(lanes);
        }
        return end;
    }

    /* Tells whether a key of the block may be hidden from one of the queries. */
    S1F_DEVICE bool hides_some(int block) const
    {
        const int first_key = block * KEYS, last_key = first_key + KEYS - 1;
        if (last_key > first_token || last_token - first_key >= rule.window)
            return true;
        if (rule.docs == nullptr)
            return false;
        const id_range ids = global_load(rule.ranges + block);
        return ids.low != ids.high || queries.low != queries.high;
    }
};

/* Finds the ranges: a thread per block of keys, batch entries along y. */
struct document_ranges {
    struct arguments {
        attention_options options;
        int32_t block_keys;
        id_range *ranges;
    };
    static constexpr int THREADS = 128, BLOCKS_PER_SM = 8;

    static S1F_DEVICE void run(const arguments &a)
    {
        const int num_tokens = a.options.num_tokens, num_blocks = (num_tokens + a.block_keys - 1) / a.block_keys;
        const int block = block_index().x * THREADS + thread_index(), batch = block_index().y;
        if (block >= num_blocks)
            return;
        const int first = block * a.block_keys, behind = first + a.block_keys;
        const int32_t *docs = a.options.docs + batch * a.options.docs_batch_stride;
        id_range ids = {INT32_MAX, INT32_MIN};
        for (int token = first; token < behind && token < num_tokens; token++) {
            const int32_t id = global_load(docs + token);
            ids.low = id < ids.low ? id : ids.low;
            ids.high = id > ids.high ? id : ids.high;
        }
        global_store(a.ranges + batch * (int64_t)num_blocks + block, ids);
    }
};

inline int64_t range_bytes(const s1f_cuda_attention &args, int block_keys)
{
    const int64_t blocks = (args.q_start + args.segment_len + block_keys - 1) / block_keys;
    return args.docs == nullptr ? 0 : args.batch * blocks * (int64_t)sizeof(id_range);
}

inline int launch_document_ranges(void (*kernel)(document_ranges::arguments), const s1f_cuda_attention &args,
                                  const attention_options &options, int block_keys, id_range *ranges, void *stream)
{
    const int num_blocks = (options.num_tokens + block_keys - 1) / block_keys, threads = document_ranges::THREADS;
    const index3 blocks = {(num_blocks + threads - 1) / threads, (int)args.batch, 1};
    const document_ranges::arguments arguments = {options, block_keys, ranges};
    return launch(kernel, blocks, threads, 0, arguments, stream);
}

} // namespace s1f

#endif
