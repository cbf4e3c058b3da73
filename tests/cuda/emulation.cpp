/* emulation.cpp - fibers, shared memory, asynchronous copies; see emulation.h. */
#include "../../kernels/cuda/sm80_primitives.cuh"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <immintrin.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace s1f
{
namespace emulation
{

int shared_limit = 163 * 1024;

namespace
{

enum { STACK_BYTES = 64 * 1024, MOST_THREADS = 1024, LAUNCH_FAILURE = 719 /* cudaErrorLaunchFailure */ };

/* -- fibers: a place in the code and its stack --------------------------------------------------------------------- */

/* Saves what a call must preserve on the stack that is left; ucontext's swap makes a system call each time. */
extern "C" void s1f_emulation_switch(void **from, void *to);
asm(R"(
.pushsection .text
.type s1f_emulation_switch, @function
s1f_emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size s1f_emulation_switch, . - s1f_emulation_switch
.popsection
)");

struct place {
    void *stack_pointer = nullptr;
};

void switch_places(place &from, place &to)
{
    s1f_emulation_switch(&from.stack_pointer, to.stack_pointer);
}

void begin_at(place &p, char *stack, void (*entry)())
{
    void **top = (void **)(stack + STACK_BYTES - 64); /* 16-byte aligned */
    top[0] = (void *)entry;                           /* `ret` goes there, and leaves the alignment of a call */
    top[1] = nullptr;
    p.stack_pointer = top - 6;
    std::fill(top - 6, top, nullptr);
}
/* -- the machine --------------------------------------------------------------------------------------------------- */

struct copy {
    uint32_t shared;
    const void *global;
    bool valid, at_once;
    int64_t group;
};

struct thread {
    place at;
    request *wanted = nullptr;
    std::vector<copy> copies;
    int64_t groups = 0;
};

struct warp {
    uint32_t runnable = 0, arrived = 0;
};

struct machine {
    uint64_t random_state = 0;
    char error[512] = "";
    bool failed = false;

    std::vector<char *> stacks;
    std::vector<thread> threads;
    std::vector<warp> warps;
    place launcher;
    int current = 0, num_threads = 0, at_barrier = 0, num_finished = 0;
    index3 block = {0, 0, 0};
    void (*body)(const void *) = nullptr;
    const void *context = nullptr;

    std::vector<chunk> shared;
    int shared_bytes = 0;
};

machine m;

uint32_t random_number() /* splitmix64 */
{
    uint64_t z = m.random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

/* Keeps the text and leaves the launch: does not come back. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fail(const char *format, ...)
{
    char text[300];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(m.error, sizeof m.error, "block (%d, %d, %d), thread %d: %s", m.block.x, m.block.y, m.block.z, m.current,
             text);
    m.failed = true;
    switch_places(m.threads[(size_t)m.current].at, m.launcher);
}

warp &warp_of(int t)
{
    return m.warps[(size_t)(t / WARP_SIZE)];
}

void switch_to(int t)
{
    if (t == m.current)
        return;
    thread &from = m.threads[(size_t)m.current], &to = m.threads[(size_t)t];
    m.current = t;
    switch_places(from.at, to.at);
}

int some_bit(uint32_t bits)
{
    const uint32_t turn = random_number() % 32, turned = turn == 0 ? bits : bits >> turn | bits << (32 - turn);
    return (int)((uint32_t)__builtin_ctz(turned) + turn) % 32;
}

/* Another thread that may run, mostly of the same warp. */
void run_another()
{
    size_t w = (size_t)(m.current / WARP_SIZE);
    if (m.warps[w].runnable == 0 || random_number() % 64 == 0) {
        const size_t turn = random_number() % m.warps.size();
        for (size_t i = 0; i < m.warps.size(); i++) {
            const size_t candidate = (turn + i) % m.warps.size();
            if (m.warps[candidate].runnable != 0) {
                w = candidate;
                break;
            }
        }
    }
    if (m.warps[w].runnable != 0)
        return switch_to((int)w * WARP_SIZE + some_bit(m.warps[w].runnable));
    for (const warp &stuck : m.warps)
        if (stuck.arrived != 0)
            fail("a warp waits for lanes that went elsewhere: lanes %08x are there", stuck.arrived);
    fail("a barrier waits for threads that went elsewhere: %d of %d are there, %d have ended", m.at_barrier,
         m.num_threads, m.num_finished);
}

/* -- shared memory ------------------------------------------------------------------------------------------------- */

char *shared_pointer(uint32_t address, int bytes)
{
    if (address % (uint32_t)bytes != 0)
        fail("shared address %u is not a multiple of %d", address, bytes);
    if (address < SHARED_BASE || (int64_t)address + bytes > SHARED_BASE + m.shared_bytes)
        fail("shared bytes [%lld, %lld) lie outside of the block's %d", (long long)address - SHARED_BASE,
             (long long)address - SHARED_BASE + bytes, m.shared_bytes);
    return (char *)m.shared.data() + (address - SHARED_BASE);
}

void read_source(const copy &c)
{
    if (c.valid)
        memcpy(shared_pointer(c.shared, CHUNK_BYTES), c.global, CHUNK_BYTES);
    else
        memset(shared_pointer(c.shared, CHUNK_BYTES), 0, CHUNK_BYTES);
}

/* -- what 32 lanes do together ------------------------------------------------------------------------------------- */

float from_bf16(uint16_t bits)
{
    const uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

float towards_zero(double x)
{
    const float rounded = (float)x;
    return std::fabs((double)rounded) > std::fabs(x) ? std::nextafter(rounded, 0.0f) : rounded;
}

void multiply(request *const *lanes)
{
    double a[16][16], b[16][8], d[16][8];
    const bool is_bf16 = lanes[0]->what == MULTIPLY_BF16;
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        const request &r = *lanes[lane];
        const int group = lane / 4, pair = lane % 4 * 2;
        const uint32_t words[6] = {r.a[0], r.a[1], r.a[2], r.a[3], r.b0, r.b1};
        for (int i = 0; i < 6; i++)
            for (int high = 0; high < 2; high++) {
                const uint16_t bits = (uint16_t)(words[i] >> (16 * high));
                const double x = is_bf16 ? from_bf16(bits) : from_fp16(bits);
                if (i < 4)
                    a[group + i % 2 * 8][pair + i / 2 * 8 + high] = x;
                else
                    b[pair + (i - 4) * 8 + high][group] = x;
            }
        for (int i = 0; i < 4; i++)
            d[group + i / 2 * 8][pair + i % 2] = r.d[i];
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++)
                d[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < WARP_SIZE; lane++)
        for (int i = 0; i < 4; i++)
            lanes[lane]->d[i] = towards_zero(d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
}

void load(request *const *lanes)
{
    const bool transposed = lanes[0]->what == LOAD_TRANSPOSED;
    const uint16_t *rows[WARP_SIZE];
    for (int lane = 0; lane < WARP_SIZE; lane++)
        rows[lane] = (const uint16_t *)shared_pointer(lanes[lane]->address, CHUNK_BYTES);
    for (int lane = 0; lane < WARP_SIZE; lane++)
        for (int matrix = 0; matrix < 4; matrix++) {
            const int group = lane / 4, pair = lane % 4 * 2;
            const uint16_t *const *row = rows + matrix * 8;
            const uint16_t low = transposed ? row[pair][group] : row[group][pair];
            const uint16_t high = transposed ? row[pair + 1][group] : row[group][pair + 1];
            lanes[lane]->words[matrix] = low | (uint32_t)high << 16;
        }
}

void shuffle_lanes(request *const *lanes)
{
    float values[WARP_SIZE];
    for (int lane = 0; lane < WARP_SIZE; lane++)
        values[lane] = lanes[lane]->value;
    for (int lane = 0; lane < WARP_SIZE; lane++)
        lanes[lane]->value = values[(lane ^ lanes[lane]->number) % WARP_SIZE];
}

void vote(request *const *lanes)
{
    uint32_t votes = 0;
    for (int lane = 0; lane < WARP_SIZE; lane++)
        votes |= (lanes[lane]->b0 != 0 ? 1u : 0u) << lane;
    for (int lane = 0; lane < WARP_SIZE; lane++)
        lanes[lane]->b1 = votes;
}

void perform(int w)
{
    request *lanes[WARP_SIZE];
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        lanes[lane] = m.threads[(size_t)(w * WARP_SIZE + lane)].wanted;
        if (lanes[lane]->what != lanes[0]->what || lanes[lane]->number != lanes[0]->number)
            fail("lanes 0 and %d of warp %d do different things together", lane, w);
    }
    switch (lanes[0]->what) {
    case MULTIPLY_BF16:
    case MULTIPLY_FP16: return multiply(lanes);
    case LOAD:
    case LOAD_TRANSPOSED: return load(lanes);
    case SHUFFLE_XOR: return shuffle_lanes(lanes);
    case BALLOT: return vote(lanes);
    case WARP_BARRIER: return;
    }
}

/* -- a launch ------------------------------------------------------------------------------------------------------ */

void fiber()
{
    m.body(m.context);
    thread &t = m.threads[(size_t)m.current];
    if (!t.copies.empty())
        fail("an asynchronous copy is never waited for");
    warp_of(m.current).runnable &= ~(1u << m.current % WARP_SIZE);
    if (++m.num_finished == m.num_threads)
        switch_places(t.at, m.launcher);
    run_another();
}

void run_block(int threads, int shared_bytes)
{
    m.num_threads = threads;
    m.at_barrier = m.num_finished = 0;
    m.threads.assign((size_t)threads, thread());
    m.warps.assign((size_t)(threads / WARP_SIZE), warp());
    for (warp &w : m.warps)
        w.runnable = 0xffffffffu;
    m.shared_bytes = shared_bytes;
    chunk poison;
    memset(&poison, 0xff, sizeof poison); /* NaN, in 16 and in 32 bits */
    m.shared.assign((size_t)(shared_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES, poison);
    while ((int)m.stacks.size() < threads)
        m.stacks.push_back((char *)aligned_alloc(64, STACK_BYTES));
    for (int t = 0; t < threads; t++) {
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(m.stacks[(size_t)t], STACK_BYTES); /* of a fiber that was left by fail() */
#endif
        begin_at(m.threads[(size_t)t].at, m.stacks[(size_t)t], fiber);
    }
    m.current = (int)(random_number() % (uint32_t)threads);
    switch_places(m.launcher, m.threads[(size_t)m.current].at);
}

} // namespace

void warp_operation(request &wanted)
{
    const int w = m.current / WARP_SIZE, lane = m.current % WARP_SIZE;
    warp &mine = m.warps[(size_t)w];
    m.threads[(size_t)m.current].wanted = &wanted;
    mine.arrived |= 1u << lane;
    mine.runnable &= ~(1u << lane);
    if (mine.arrived == 0xffffffffu) {
        perform(w);
        mine.arrived = 0;
        mine.runnable = 0xffffffffu;
        if (random_number() % 4 != 0)
            return; /* go on as the first, not always */
    }
    run_another();
}

void *shared_access(uint32_t address, int bytes)
{
    return shared_pointer(address, bytes);
}

void copy_async_wait(int groups)
{
    thread &t = m.threads[(size_t)m.current];
    const auto is_late = [&](const copy &c) { return c.group >= t.groups - groups; };
    for (const copy &c : t.copies)
        if (!is_late(c) && !c.at_once)
            read_source(c);
    t.copies.erase(std::remove_if(t.copies.begin(), t.copies.end(), [&](const copy &c) { return !is_late(c); }),
                   t.copies.end());
}

int launch(index3 blocks, int threads, int shared_bytes, void (*body)(const void *), const void *context)
{
    if (m.failed)
        return LAUNCH_FAILURE;
    m.body = body;
    m.context = context;
    const char *wrong = blocks.x < 1 || blocks.y < 1 || blocks.z < 1 || blocks.y > 65535 || blocks.z > 65535
                            ? "the grid"
                        : threads < 1 || threads > MOST_THREADS || threads % WARP_SIZE != 0 ? "the number of threads"
                        : shared_bytes > shared_limit                                       ? "the shared memory"
                                                                                            : nullptr;
    if (wrong != nullptr) {
        snprintf(m.error, sizeof m.error, "a launch has %s out of range", wrong);
        m.failed = true;
        return LAUNCH_FAILURE;
    }
    std::vector<int64_t> order((size_t)((int64_t)blocks.x * blocks.y * blocks.z));
    for (size_t i = 0; i < order.size(); i++)
        order[i] = (int64_t)i;
    for (size_t i = order.size(); i > 1; i--)
        std::swap(order[i - 1], order[random_number() % i]);
    for (const int64_t index : order) {
        m.block = {(int)(index % blocks.x), (int)(index / blocks.x % blocks.y), (int)(index / blocks.x / blocks.y)};
        run_block(threads, shared_bytes);
        if (m.failed)
            return LAUNCH_FAILURE;
    }
    return 0;
}

float from_fp16(uint16_t bits)
{
    return _cvtsh_ss(bits);
}

uint16_t to_fp16(float x)
{
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}

uint16_t to_bf16(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    if (x != x)
        return 0x7fff;
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

} // namespace emulation

/* -- what kernels call --------------------------------------------------------------------------------------------- */

using namespace emulation;

int thread_index()
{
    return m.current;
}

index3 block_index()
{
    return m.block;
}

void block_barrier()
{
    warp_of(m.current).runnable &= ~(1u << m.current % WARP_SIZE);
    if (++m.at_barrier == m.num_threads) {
        for (warp &w : m.warps)
            w.runnable = 0xffffffffu;
        m.at_barrier = 0;
    }
    run_another();
}

void copy_async_16(uint32_t shared, const void *global, bool valid)
{
    thread &t = m.threads[(size_t)m.current];
    const copy issued = {shared, global, valid, random_number() % 2 == 0, t.groups};
    if (issued.at_once)
        read_source(issued);
    else
        memset(shared_pointer(shared, CHUNK_BYTES), 0xff, CHUNK_BYTES);
    t.copies.push_back(issued);
}

void copy_async_commit()
{
    m.threads[(size_t)m.current].groups++;
}

} // namespace s1f

/* -- for the tests, in C ------------------------------------------------------------------------------------------- */

using s1f::emulation::m;

extern "C" {
#define S1F_EXPORT __attribute__((visibility("default")))

/* Forgets errors; random numbers start from the seed. */
S1F_EXPORT void s1f_emulation_reset(uint64_t seed)
{
    m.random_state = seed;
    m.error[0] = '\0';
    m.failed = false;
}

S1F_EXPORT void s1f_emulation_set(int shared_limit)
{
    s1f::emulation::shared_limit = shared_limit;
}

/* What the first error since the reset was; "": none. */
S1F_EXPORT const char *s1f_emulation_error(void)
{
    return m.error;
}
}
