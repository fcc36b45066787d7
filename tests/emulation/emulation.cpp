// The fibers of the emulation: see cuda_runtime.h. Compiled without sanitizers, so that it may poison and switch what it likes;
// the kernels are compiled with any.
//
// A block's threads run one after the other, each until it waits or ends, in an order that MDPS_EMULATION_ORDER chooses:
// "forward" (the default), "reverse", or a number, the seed of a random one. With MDPS_EMULATION_FAIL every launch fails. A
// warp operation waits for the lanes of its mask alone, so that code which takes it for granted that lanes move together fails.
//
// Under ThreadSanitizer a switch orders nothing by itself; only barriers and __syncwarp do, as on a GPU. So a read of shared
// memory that no barrier separates from the write is a race that it reports. Two variables stand for each barrier: threads
// release "arrived", the scheduler turns it into "left" once all have arrived, and threads acquire that; with one variable a
// thread that arrives early would be ordered after one that is late to leave. For __syncwarp the scheduler does so under a name
// of the warp's own: what it learned from one warp it must not tell another.
#include "cuda_runtime.h"

#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <utility>
#include <vector>

#define WEAK extern "C" __attribute__((weak))
WEAK void __sanitizer_start_switch_fiber(void **, const void *, size_t);
WEAK void __sanitizer_finish_switch_fiber(void *, const void **, size_t *);
WEAK void __asan_unpoison_memory_region(const volatile void *, size_t);
WEAK void *__tsan_get_current_fiber();
WEAK void *__tsan_create_fiber(unsigned);
WEAK void __tsan_switch_to_fiber(void *, unsigned);
WEAK void __tsan_acquire(void *);
WEAK void __tsan_release(void *);

// Saves the registers that a call keeps, on the stack; stores the stack pointer and takes the other one.
extern "C" void emulation_switch(void **save, void *to);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size emulation_switch, .-emulation_switch
)");
#else
#error "the emulation switches fibers in x86-64 assembly"
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
void *block_memory;

namespace emulation {
namespace {
enum State { READY, AT_BARRIER, AT_WARP, DONE };
enum { STACK = 128 * 1024, PAGE = 4096, LANES = 32 };

struct Fiber {
    State state;
    unsigned thread;
    char *stack;
    void *pointer;     // of its stack, while another runs
    void *fake, *tsan; // what the sanitizers know it by
    int line;          // of the barrier or warp operation
    int said, answer;  // at a barrier that votes
    unsigned mask, present;
    Operation operation;
    uint64_t value, values[LANES];
};

// Only their addresses are used.
struct Order {
    char arrived, left, arrived_warp[LANES], left_warp[LANES];
} order_of;

Fiber fibers[1024];
Fiber *current;
void *main_pointer, *main_fake, *main_tsan, *warp_tsan[LANES];
const void *main_stack;
size_t main_size;
void (*kernel)(const void *);
const void *parameters;
uint64_t random_state;
bool reverse_order, random_order;
int n_threads;

[[noreturn]] void fail(const char *what) {
    fprintf(stderr, "CUDA emulation: block %u, thread %u: %s\n", blockIdx.x, current->thread, what);
    abort();
}

void acquire(void *address) {
    if (__tsan_acquire) __tsan_acquire(address);
}
void release(void *address) {
    if (__tsan_release) __tsan_release(address);
}

void to_scheduler() {
    Fiber *f = current;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(f->state == DONE ? nullptr : &f->fake, main_stack, main_size);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(main_tsan, 1);
    emulation_switch(&f->pointer, main_pointer);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(f->fake, &main_stack, &main_size);
}

void to_fiber(Fiber *f) {
    current = f;
    threadIdx = {f->thread, 0, 0};
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&main_fake, f->stack, STACK);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(f->tsan, 1);
    emulation_switch(&main_pointer, f->pointer);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(main_fake, nullptr, nullptr);
}

// What a fiber begins with.
void entry() {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_size);
    acquire(&order_of.left);
    kernel(parameters);
    release(&order_of.arrived);
    current->state = DONE;
    to_scheduler();
    abort();
}

void give_stack(Fiber *f) {
    char *memory =
        (char *)mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE)) {
        fprintf(stderr, "CUDA emulation: no memory for a stack\n");
        abort();
    }
    f->stack = memory + PAGE;
    if (__tsan_create_fiber) f->tsan = __tsan_create_fiber(0);
}

void start(Fiber *f, int thread) {
    f->thread = (unsigned)thread;
    f->state = READY;
    void **top = (void **)(f->stack + STACK - 64);
    *--top = nullptr; // the stack is as after a call
    *--top = (void *)entry;
    for (int r = 0; r < 6; r++) *--top = nullptr;
    f->pointer = top;
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(f->stack, STACK);
}

// What the lanes of a warp did before their __syncwarp comes before what they do after it.
void order_warp(int number) {
    if (!__tsan_switch_to_fiber) return;
    if (!warp_tsan[number]) warp_tsan[number] = __tsan_create_fiber(0);
    __tsan_switch_to_fiber(warp_tsan[number], 1);
    acquire(&order_of.arrived_warp[number]);
    release(&order_of.left_warp[number]);
    __tsan_switch_to_fiber(main_tsan, 1);
}

unsigned random_below(unsigned n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)(random_state % n);
}

// Lets every warp operation happen whose lanes are all there. Returns whether one was.
bool complete_warp(int first) {
    const int n = n_threads - first < LANES ? n_threads - first : LANES;
    unsigned waiting = 0, exist = n == LANES ? ~0u : (1u << n) - 1;
    bool done = false;
    for (int i = 0; i < n; i++) waiting |= (unsigned)(fibers[first + i].state == AT_WARP) << i;
    while (waiting) {
        Fiber *leader = &fibers[first + __builtin_ctz(waiting)];
        const unsigned mask = leader->mask;
        current = leader;
        if (mask & ~exist) fail("a mask names lanes that the block does not have");
        bool all_here = true;
        for (int i = 0; i < n; i++)
            if (mask >> i & 1) {
                Fiber *f = &fibers[first + i];
                if (f->state == DONE) fail("a mask names a lane that has ended");
                all_here &= f->state == AT_WARP;
                if (f->state == AT_WARP && f->mask != mask) fail("lanes of one operation pass different masks");
                if (f->state == AT_WARP && (f->operation != leader->operation || f->line != leader->line))
                    fail("lanes of one operation are at different ones");
            }
        waiting &= ~mask;
        if (!all_here) continue;
        for (int i = 0; i < n; i++)
            if (mask >> i & 1) {
                Fiber *f = &fibers[first + i];
                for (int k = 0; k < n; k++) f->values[k] = fibers[first + k].value;
                f->present = mask;
                f->state = READY;
            }
        if (leader->operation == SYNC_WARP) order_warp(first / LANES);
        done = true;
    }
    return done;
}

// Opens the barrier if every thread that has not ended waits at it.
bool complete_barrier() {
    int waiting = 0, ended = 0, votes = 0;
    Fiber *first = nullptr;
    for (int i = 0; i < n_threads; i++) {
        Fiber *f = &fibers[i];
        ended += f->state == DONE;
        if (f->state != AT_BARRIER) continue;
        waiting++;
        votes += f->said;
        if (!first) first = f;
        current = f;
        if (f->line != first->line) fail("__syncthreads at different lines");
    }
    if (!waiting || waiting + ended < n_threads) return false;
    if (ended) fail("__syncthreads after a thread has ended");
    for (int i = 0; i < n_threads; i++) fibers[i].state = READY, fibers[i].answer = votes;
    acquire(&order_of.arrived);
    release(&order_of.left);
    return true;
}

void run_block() {
    std::vector<int> turn(n_threads);
    for (int i = 0; i < n_threads; i++) turn[i] = reverse_order ? n_threads - 1 - i : i;
    for (int alive = n_threads; alive;) {
        bool moved = false;
        if (random_order)
            for (int i = n_threads - 1; i > 0; i--) std::swap(turn[i], turn[random_below(i + 1)]);
        for (int i : turn) {
            Fiber *f = &fibers[i];
            if (f->state != READY) continue;
            moved = true;
            if (random_order && random_below(4) == 0) continue;
            to_fiber(f);
            alive -= f->state == DONE;
        }
        for (int first = 0; first < n_threads; first += LANES) moved |= complete_warp(first);
        moved |= complete_barrier();
        if (!moved && alive) fail("deadlock: it waits for threads that never come");
    }
}

void choose_order() {
    const char *order = getenv("MDPS_EMULATION_ORDER");
    reverse_order = order && !strcmp(order, "reverse");
    random_order = order && order[0] >= '0' && order[0] <= '9';
    if (random_order) random_state = strtoull(order, nullptr, 10) * 0x9E3779B97F4A7C15u + 1;
}
} // namespace

int barrier_vote(int line, int predicate) {
    Fiber *f = current;
    f->state = AT_BARRIER;
    f->line = line;
    f->said = predicate;
    release(&order_of.arrived);
    to_scheduler();
    acquire(&order_of.left);
    return f->answer;
}

void barrier(int line) { (void)barrier_vote(line, 0); }

uint64_t warp(unsigned mask, Operation operation, Line line, uint64_t value, int from) {
    Fiber *f = current;
    const int here = (int)f->thread % LANES, number = (int)f->thread / LANES;
    if (!(mask >> here & 1)) fail("a lane is not in the mask of its own operation");
    f->state = AT_WARP;
    f->mask = mask;
    f->operation = operation;
    f->line = (int)line;
    f->value = value;
    if (operation == SYNC_WARP) release(&order_of.arrived_warp[number]);
    to_scheduler();
    if (operation == SYNC_WARP) acquire(&order_of.left_warp[number]);
    if (operation == VOTE) {
        uint64_t yes = 0;
        for (int i = 0; i < LANES; i++) yes |= (uint64_t)((f->present >> i & 1) && f->values[i]) << i;
        return yes;
    }
    if (operation == SYNC_WARP) return 0;
    if (from < 0 || from >= LANES || !(f->present >> from & 1)) fail("a shuffle reads a lane that its mask does not name");
    return f->values[from];
}

int run(dim3 blocks, dim3 threads, size_t shared, void (*body)(const void *), const void *job) {
    static std::mutex one_launch;
    std::lock_guard<std::mutex> lock(one_launch);
    if (getenv("MDPS_EMULATION_FAIL")) return cudaErrorNoKernelImageForDevice; // as a card does that is too old
    n_threads = (int)threads.x;
    if (n_threads < 1 || n_threads > 1024 || n_threads % LANES || threads.y != 1 || threads.z != 1)
        return cudaErrorInvalidConfiguration;
    if (blocks.x < 1 || blocks.y != 1 || blocks.z != 1 || shared > 227 * 1024) return cudaErrorInvalidConfiguration;
    for (int i = 0; i < n_threads; i++)
        if (!fibers[i].stack) give_stack(&fibers[i]);
    choose_order();
    blockDim = threads;
    gridDim = blocks;
    kernel = body;
    parameters = job;
    if (__tsan_get_current_fiber) main_tsan = __tsan_get_current_fiber();
    for (unsigned i = 0; i < blocks.x; i++) {
        blockIdx = {reverse_order ? blocks.x - 1 - i : i, 0, 0};
        block_memory = malloc(shared ? shared : 1); // by the sanitizer, if there is one: it knows where this ends
        memset(block_memory, 0xff, shared);
        for (int t = 0; t < n_threads; t++) start(&fibers[t], t);
        release(&order_of.left);
        run_block();
        acquire(&order_of.arrived);
        free(block_memory);
    }
    return cudaSuccess;
}
} // namespace emulation
