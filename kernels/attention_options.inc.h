/* attention_options.inc.h - window, soft cap, slopes, documents. Included by attention_blocked.inc.h.
 *
 * Softmax works on exponents of two, x = factor S with S = q k^T and factor = scale log2(e). Where soft cap or slopes
 * are on, a pass over S turns it into exponents first, and the factor is 1. Where only window or documents are, the
 * pass lowers what they hide and leaves the rest of S as it is, to the bit: whether a row takes the pass depends on the
 * rows beside it, and these on the number of threads. Blocks of which an option hides every pair are skipped. */

static const double LOG2_E = 1.44269504088896340736;
static const double LN_2 = 0.69314718055994530942;
/* LOWEST: the highest exponent of a row that has seen nothing yet. Finite, so that differences stay numbers. HIDDEN:
 * added to S or an exponent, it leaves a power of 0 beside anything that is seen; and a row of which a block hides all
 * gets sums that the first key it sees multiplies by 0. It stays finite times the factor. */
static const float LOWEST = -0x1p126f, HIDDEN = -0x1p100f;

typedef struct {        /* of one query head */
    float factor;       /* of S */
    float cap, inner;   /* cap 0: none; else the exponent is cap tanh(inner S) */
    float slope;        /* exponents per key of distance */
    int64_t window;     /* 0: all */
    int64_t num_tokens; /* T */
    const int32_t *docs;
    int64_t shared; /* keys before it are in everybody's document */
    int transforms; /* 1: the pass is needed even where nothing is hidden */
} exponent_rule;

static exponent_rule rule_of(const s1f_attention_args *args, int64_t batch, int64_t head)
{
    int64_t tokens = args->q_start + args->segment_len;
    exponent_rule rule = {
        .factor = (float)(args->scale * LOG2_E),
        .window = args->window < tokens ? args->window : 0,
        .num_tokens = tokens,
        .docs = args->docs ? args->docs + batch * args->docs_batch_stride : NULL,
        .shared = args->shared_keys,
    };
    if (args->softcap > 0) {
        rule.cap = (float)(args->softcap * LOG2_E);
        rule.inner = (float)(args->scale / args->softcap);
    }
    if (args->slopes)
        rule.slope = (float)((double)args->slopes[batch * args->slopes_batch_stride + head] * LOG2_E);
    rule.transforms = rule.cap != 0 || rule.slope != 0 || rule.factor <= 0; /* softmax wants the largest S on top */
    return rule;
}

typedef enum { ALL_HIDDEN, SOME_HIDDEN, NONE_HIDDEN } visibility; /* but for causality */

static void id_range(const int32_t *ids, int64_t count, int32_t *low, int32_t *high)
{
    *low = *high = ids[0];
    for (int64_t i = 1; i < count; i++) {
        *low = ids[i] < *low ? ids[i] : *low;
        *high = ids[i] > *high ? ids[i] : *high;
    }
}

/* Tells how much the rows from `token` on see of the keys from `first_key` on. Rows past the last token do not
 * count. */
static visibility block_visibility(const exponent_rule *rule, int64_t token, int64_t rows, int64_t first_key,
                                   int64_t keys)
{
    int64_t last = s1f_min(token + rows, rule->num_tokens) - 1;
    visibility seen = NONE_HIDDEN;
    if (rule->window > 0) {
        if (first_key + keys - 1 <= token - rule->window)
            return ALL_HIDDEN;
        if (first_key <= last - rule->window)
            seen = SOME_HIDDEN;
    }
    int64_t first_own = s1f_max(first_key, rule->shared), end = s1f_min(first_key + keys, last + 1);
    if (rule->docs && first_own < end) {
        int32_t low, high, key_low, key_high;
        id_range(rule->docs + token, last + 1 - token, &low, &high);
        id_range(rule->docs + first_own, end - first_own, &key_low, &key_high);
        if (first_own == first_key && (low > key_high || key_low > high))
            return ALL_HIDDEN;
        if (low != high || key_low != key_high || low != key_low)
            seen = SOME_HIDDEN;
    }
    return seen;
}

/* First key that any row from `token` on may see. */
static int64_t first_visible(const exponent_rule *rule, int64_t token)
{
    return rule->window > 0 ? s1f_max(0, token + 1 - rule->window) : 0;
}

/* hidden[i] becomes what to add for key first_key + i: 0 or HIDDEN; 0 up to a whole vector. */
static void hide_keys(const exponent_rule *rule, int64_t token, int64_t first_key, int64_t keys, float *hidden)
{
    int64_t outside = s1f_min(keys, s1f_max(0, first_visible(rule, token) - first_key)), i = 0;
    for (; i < outside; i++)
        hidden[i] = HIDDEN;
    if (rule->docs) {
        int32_t own = rule->docs[s1f_min(token, rule->num_tokens - 1)];
        for (; i < keys; i++)
            hidden[i] = first_key + i < rule->shared || rule->docs[first_key + i] == own ? 0 : HIDDEN;
    }
    for (; i < round_up(keys, VEC_LANES); i++)
        hidden[i] = 0;
}

/* One row of S, of which `num_seen` keys are seen: exponents in its place, or S where the rule transforms nothing.
 * derivative, if any: of the capped product by the product, 1 without a cap. hidden: from hide_keys, or NULL. Whole
 * vectors are written. */
static void exponents_row(const exponent_rule *rule, float *s, float *derivative, const float *hidden, int64_t token,
                          int64_t first_key, int64_t num_seen)
{
    float counting[VEC_LANES];
    for (int i = 0; i < VEC_LANES; i++)
        counting[i] = (float)i;
    vec lanes = VEC_LOAD(counting);
    for (int64_t c = 0; c < num_seen; c += VEC_LANES) {
        vec x = VEC_LOAD(s + c);
        if (rule->cap != 0) {
            vec t = tanh_vec(VEC_MUL(x, VEC_ALL(rule->inner)));
            if (derivative)
                VEC_STORE(derivative + c, VEC_SUB(VEC_ALL(1), VEC_MUL(t, t)));
            x = VEC_MUL(t, VEC_ALL(rule->cap));
        } else if (rule->transforms) {
            x = VEC_MUL(x, VEC_ALL(rule->factor));
        }
        if (rule->slope != 0)
            x = VEC_FMA(VEC_ALL(rule->slope), VEC_ADD(lanes, VEC_ALL((float)(first_key + c - token))), x);
        if (hidden)
            x = VEC_ADD(x, VEC_LOAD(hidden + c));
        VEC_STORE(s + c, x);
    }
}
