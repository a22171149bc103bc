// What a kernel finds on a GPU, on a processor: the types and functions that the backend's generated CUDA uses, and a scheduler that runs the
// threads of a block one after the other, each until it waits for others. Put in front of a kernel's source, whose own includes are dropped.
//
// A fragment of a matrix is divided among a warp's threads as CUDA leaves open: thread t keeps elements 8t to 8t+7 of the product, row by
// row, and of the factors the row and the columns that those need.

#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ucontext.h>

#include "../../../comm-nccl/tests/gpu/numbers.hpp"

// The generated source defines these by itself, differently.
#define int8_t stand_in_int8_t
#define int16_t stand_in_int16_t
#define int32_t stand_in_int32_t
#define int64_t stand_in_int64_t
#define uint8_t stand_in_uint8_t
#define uint16_t stand_in_uint16_t
#define uint32_t stand_in_uint32_t
#define uint64_t stand_in_uint64_t

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace stand_in {

struct Dim {
    unsigned x, y, z;
};

[[noreturn]] inline void fail(const char *what) {
    std::fprintf(stderr, "stand-in GPU: %s\n", what);
    std::abort();
}

/// A number of 16 bits. One operation in f32, rounded, is the operation rounded: f32 has more than twice the digits.
template <class Kind> struct Half {
    unsigned short value;
    Half() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> Half(T number) : value(Kind::of(float(number))) {}
    template <class Other> explicit Half(Half<Other> other) : Half(float(other)) {}
    explicit operator float() const { return Kind::to(value); }
    explicit operator bool() const { return float(*this) != 0; }
    template <class T, class = std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>> explicit operator T() const {
        return T(float(*this));
    }
    Half operator-() const { return -float(*this); }
#define OPERATOR(result, op) friend result operator op(Half a, Half b) { return result(float(a) op float(b)); }
    OPERATOR(Half, +) OPERATOR(Half, -) OPERATOR(Half, *) OPERATOR(Half, /)
    OPERATOR(bool, <) OPERATOR(bool, <=) OPERATOR(bool, >) OPERATOR(bool, >=) OPERATOR(bool, ==) OPERATOR(bool, !=)
#undef OPERATOR
};

} // namespace stand_in

using __nv_bfloat16 = stand_in::Half<stand_in::Bf16>;
using __half = stand_in::Half<stand_in::F16>;

static stand_in::Dim threadIdx, blockIdx, blockDim, gridDim;

using std::fma;
using std::isinf;
using std::isnan;

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline int __clz(int value) { return value ? __builtin_clz(unsigned(value)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }

// The threads of a block.
namespace stand_in {

/// What was there before. One thread runs at a time.
inline float atomic_add(const float *at, float value) {
    float before = *at;
    *const_cast<float *>(at) += value;
    return before;
}

enum Wait { RUNS, WARP, BLOCK, ENDED };

constexpr std::size_t STACK = 128 << 10;

struct Thread {
    std::jmp_buf at;
    Wait wait;
    void *stack;
};

// Not taken down when the process ends, while one may run.
static std::vector<Thread> &threads = *new std::vector<Thread>;
static std::jmp_buf scheduler;
static unsigned current;
static void (*body)(void *);
static void *body_arguments;

/// Back to the scheduler, until it resumes this thread.
static void leave(Wait why) {
    threads[current].wait = why;
    if (_setjmp(threads[current].at) == 0) _longjmp(scheduler, 1);
}

/// One block's thread after the other.
static void enter() {
    for (;;) {
        body(body_arguments);
        leave(ENDED);
    }
}

/// Runs a thread until it waits or ends.
static void resume(unsigned thread) {
    current = thread;
    threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y)};
    Thread &it = threads[thread];
    if (_setjmp(scheduler) != 0) return;
    if (it.stack) _longjmp(it.at, 1);
    // What of it is not used takes no memory.
    it.stack = std::malloc(STACK);
    if (!it.stack) fail("out of memory");
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = it.stack;
    start.uc_stack.ss_size = STACK;
    start.uc_link = nullptr;
    makecontext(&start, enter, 0);
    setcontext(&start);
}

/// Threads of a warp, and warps of a block, in the order of their numbers or in the reverse.
static void run_block(unsigned count, bool reverse) {
    if (threads.size() < count) threads.resize(count);
    for (unsigned i = 0; i < count; i++) threads[i].wait = RUNS;
    unsigned warps = (count + 31) / 32;
    for (bool ended = false; !ended;) {
        ended = true;
        for (unsigned i = 0; i < warps; i++) {
            unsigned first = 32 * (reverse ? warps - 1 - i : i), last = min(first + 32, count);
            // Until every thread of the warp waits for the block, or has ended.
            for (;;) {
                unsigned runs = 0, waits_warp = 0, waits_block = 0;
                for (unsigned t = first; t < last; t++) {
                    if (threads[t].wait == RUNS) runs++;
                    if (threads[t].wait == WARP) waits_warp++;
                    if (threads[t].wait == BLOCK) waits_block++;
                }
                if (runs == 0 && waits_warp == 0) break;
                if (runs == 0 && waits_block > 0) fail("threads of a warp wait at different barriers");
                for (unsigned i = 0; i < last - first; i++) {
                    unsigned t = reverse ? last - 1 - i : first + i;
                    if (threads[t].wait == RUNS || (runs == 0 && threads[t].wait == WARP)) resume(t);
                }
            }
        }
        for (unsigned t = 0; t < count; t++)
            if (threads[t].wait == BLOCK) threads[t].wait = RUNS, ended = false;
    }
}

} // namespace stand_in

// Until all others of the block or the warp that have not ended are here too.
inline void __syncthreads() { stand_in::leave(stand_in::BLOCK); }
inline void __syncwarp() { stand_in::leave(stand_in::WARP); }

// Products of matrices by a warp.
namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}

/// f32 with 10 bits of fraction, of two that are as near the larger. With STAND_IN_TF32 unset all bits are kept.
inline float __float_to_tf32(float value) {
    static const bool rounds = std::getenv("STAND_IN_TF32") != nullptr;
    return rounds && value == value ? stand_in::bits<float>((stand_in::bits<unsigned>(value) + 0x1000) & ~0x1fffu) : value;
}

template <class T> struct Stored {
    using type = T;
};
template <> struct Stored<precision::tf32> {
    using type = float;
};

/// This thread's place in its warp.
inline unsigned lane() { return stand_in::current % 32; }

/// Elements `8 * lane` to `8 * lane + 7` of a product of M rows and N columns.
template <int M, int N> struct Place {
    static_assert(M * N == 256 && N % 8 == 0);
    static unsigned row() { return 8 * lane() / N; }
    static unsigned column() { return 8 * lane() % N; }
};

template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment;
template <int M, int N, int K, class T> struct fragment<accumulator, M, N, K, T> {
    static constexpr int num_elements = 8;
    T x[8];
};
template <int M, int N, int K, class T, class Layout> struct fragment<matrix_a, M, N, K, T, Layout> {
    static constexpr int num_elements = K;
    typename Stored<T>::type x[K];
};
template <int M, int N, int K, class T, class Layout> struct fragment<matrix_b, M, N, K, T, Layout> {
    static constexpr int num_elements = 8 * K;
    typename Stored<T>::type x[8 * K];
};

template <class Layout> std::size_t at(unsigned row, unsigned column, unsigned stride) {
    return std::is_same_v<Layout, row_major> ? std::size_t(row) * stride + column : std::size_t(column) * stride + row;
}

// Each begins where the whole warp has come to, as on a GPU.
template <int M, int N, int K, class T, class Layout, class S>
void load_matrix_sync(fragment<matrix_a, M, N, K, T, Layout> &to, const S *from, unsigned stride) {
    __syncwarp();
    for (unsigned k = 0; k < K; k++) to.x[k] = from[at<Layout>(Place<M, N>::row(), k, stride)];
}

template <int M, int N, int K, class T, class Layout, class S>
void load_matrix_sync(fragment<matrix_b, M, N, K, T, Layout> &to, const S *from, unsigned stride) {
    __syncwarp();
    for (unsigned k = 0; k < K; k++)
        for (unsigned n = 0; n < 8; n++) to.x[8 * k + n] = from[at<Layout>(k, Place<M, N>::column() + n, stride)];
}

template <int M, int N, int K, class T, class S>
void load_matrix_sync(fragment<accumulator, M, N, K, T> &to, const S *from, unsigned stride, layout_t layout) {
    __syncwarp();
    for (unsigned n = 0; n < 8; n++) {
        unsigned row = Place<M, N>::row(), column = Place<M, N>::column() + n;
        to.x[n] = from[layout == mem_row_major ? at<row_major>(row, column, stride) : at<col_major>(row, column, stride)];
    }
}

template <int M, int N, int K, class T, class S>
void store_matrix_sync(S *to, const fragment<accumulator, M, N, K, T> &from, unsigned stride, layout_t layout) {
    __syncwarp();
    for (unsigned n = 0; n < 8; n++) {
        unsigned row = Place<M, N>::row(), column = Place<M, N>::column() + n;
        to[layout == mem_row_major ? at<row_major>(row, column, stride) : at<col_major>(row, column, stride)] = from.x[n];
    }
}

template <class Use, int M, int N, int K, class T, class Layout, class S>
void fill_fragment(fragment<Use, M, N, K, T, Layout> &to, S value) {
    for (auto &x : to.x) x = value;
}

template <int M, int N, int K, class D, class A, class LayoutA, class B, class LayoutB, class C>
void mma_sync(fragment<accumulator, M, N, K, D> &to, const fragment<matrix_a, M, N, K, A, LayoutA> &a,
              const fragment<matrix_b, M, N, K, B, LayoutB> &b, const fragment<accumulator, M, N, K, C> &c) {
    float sums[8];
    for (unsigned n = 0; n < 8; n++) sums[n] = float(c.x[n]);
    for (unsigned k = 0; k < K; k++)
        for (unsigned n = 0; n < 8; n++) sums[n] += float(a.x[k]) * float(b.x[8 * k + n]);
    for (unsigned n = 0; n < 8; n++) to.x[n] = D(sums[n]);
}

} // namespace nvcuda::wmma

// How the driver calls the kernel that follows.
namespace stand_in {

template <class Kernel> struct Caller;
template <class... P> struct Caller<void (*)(P...)> {
    using Arguments = std::tuple<std::decay_t<P>...>;
    template <std::size_t... I> static void *copy(void **from, std::index_sequence<I...>) {
        return new Arguments(*static_cast<std::decay_t<P> *>(from[I])...);
    }
    static void *copy(void **from) { return copy(from, std::index_sequence_for<P...>()); }
};

/// Bytes behind a block's shared memory that it must leave alone.
constexpr std::size_t GUARD = 256;

template <auto kernel>
void run(void *arguments, const unsigned *grid, const unsigned *block, char *shared, std::size_t shared_size, std::size_t shared_bytes,
         bool reverse) {
    using Arguments = typename Caller<decltype(kernel)>::Arguments;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    body = [](void *arguments) { std::apply(kernel, *static_cast<Arguments *>(arguments)); };
    body_arguments = arguments;
    if (shared_bytes + GUARD > shared_size) fail("more shared memory was asked for than a block has");
    std::size_t blocks = std::size_t(grid[0]) * grid[1] * grid[2];
    // Threads in either order by turns: what lacks a barrier may be right in one of them.
    static bool turn = false;
    for (std::size_t i = 0; i < blocks; i++) {
        std::size_t b = reverse ? blocks - 1 - i : i;
        blockIdx = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / grid[0] / grid[1])};
        // No number, in every floating-point type.
        std::memset(shared, 0xff, shared_bytes + GUARD);
        turn = !turn;
        run_block(block[0] * block[1] * block[2], reverse && turn);
        for (std::size_t i = 0; i < GUARD; i++)
            if (shared[shared_bytes + i] != char(0xff)) fail("a kernel wrote behind its shared memory");
    }
    delete static_cast<Arguments *>(arguments);
}

} // namespace stand_in
