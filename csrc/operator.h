/* What every csrc/<operator>.c is written with: take the arguments, allocate the results, run, finish.
 *
 *     static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
 *         (void)n_args, (void)n_results;
 *         Call call = {.op = "name"};
 *         Tensor x = take_tensor(&call, stack[0], "x", 2);        every argument, in order, whatever failed before
 *         expect(&call, condition, "x: expected ..., got ...");
 *         Tensor y = new_tensor(&call, &x, 2, x.size);
 *         Name p = {.B = x.size[0], .x = x.data, .y = y.data};     the parameters that kernels/name.h describes
 *         run(&call, &x, KERNELS(name), &p, p.B, 1);
 *         finish(&call, stack, 1, (Tensor[]){y});                 frees what is owned; throws if something failed
 *     }
 *     OPERATOR(name, "name(Tensor x) -> Tensor", forward)
 *
 * Only the first failure is kept. After it, tensors that are taken or made have size 0 in all dimensions, and `run` does
 * nothing. What was taken before keeps its sizes, and integers are what the caller gave: divide by them only if ok(call).
 * `finish` is the only function that throws, and it is called last, when nothing is owned any more.
 */
#ifndef MDPS_OPERATOR_H
#define MDPS_OPERATOR_H

#include "cuda_launch.h"
#include "torch_c.h"

enum { MAX_OWNED = 96, MAX_DIM = 8, MAX_FLOATS = 16 };

typedef struct {
    AtenTensorHandle handle; /* NULL: an argument or a gradient that is not there */
    void *data;
    int64_t dim, size[MAX_DIM];
    int32_t dtype, device_type, device_index;
    bool is_double;
} Tensor;

typedef struct {
    const char *op;
    int n_owned;
    AtenTensorHandle owned[MAX_OWNED];
    char error[256];
} Call;

/* What a kernel in kernels/ looks like: work on items [begin, end) of what `parameters` describes. */
typedef void Kernel(int64_t begin, int64_t end, void *parameters);
/* The same on the GPU, all n items (cuda_launch.h). */
typedef int Launcher(const void *parameters, int64_t n, int is_double, void *stream);
typedef struct {
    Kernel *f32, *f64;
    Launcher *cuda; /* NULL: a step that the GPU does within another one */
} Kernels;
#define KERNELS(name) ((Kernels){name##_f32, name##_f64, name##_cuda})
#define CPU_KERNELS(name) ((Kernels){name##_f32, name##_f64, NULL})

static inline bool ok(const Call *call) { return call->error[0] == 0; }
void fail(Call *call, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define expect(call, condition, ...) ((condition) ? (void)0 : fail(call, __VA_ARGS__))

/* Argument of type Tensor: float32 or float64, `dim` dimensions; copied when it is not contiguous. */
Tensor take_tensor(Call *call, StableIValue value, const char *name, int dim);
/* The same, int64; bool. */
Tensor take_indices(Call *call, StableIValue value, const char *name, int dim);
Tensor take_flags(Call *call, StableIValue value, const char *name, int dim);
/* Bandwidths (D) or (B, D); seeds () or (B): what is shared by the batch lacks its dimension, `dim` - 1. */
Tensor take_shared_tensor(Call *call, StableIValue value, const char *name, int dim);
Tensor take_shared_indices(Call *call, StableIValue value, const char *name, int dim);
/* x has the dtype (unless it holds indices or flags) and the device of y. */
void expect_like(Call *call, const Tensor *x, const char *x_name, const Tensor *y, const char *y_name);
/* x has these sizes in its last dimensions; a size in front that the batch shares may be missing. */
void expect_size(Call *call, const Tensor *x, const char *name, int dim, const int64_t *size);

static inline int64_t take_int(StableIValue value) { return (int64_t)value; }
static inline double take_float(StableIValue value) {
    union {
        uint64_t bits;
        double real;
    } u = {value};
    return u.real;
}
/* Optional argument: true and *inner when it is given; frees the cell that held it. */
bool take_optional(StableIValue value, StableIValue *inner);
/* int[]: number of items, at most `max` stored. */
int take_ints(Call *call, StableIValue value, const char *name, int max, int64_t *items);
/* float[]: the same, at most MAX_FLOATS. */
int take_floats(Call *call, StableIValue value, const char *name, double *items);
/* n_angular: an int in [0, D], with D = `dim` in [1, 16]. */
int take_n_angular(Call *call, StableIValue value, int64_t dim);

/* Uninitialised, contiguous, with the dtype and device of `like`; the same with int64. */
Tensor new_tensor(Call *call, const Tensor *like, int dim, const int64_t *size);
Tensor new_indices(Call *call, const Tensor *like, int dim, const int64_t *size);
/* Sizes and data of x[i], and of x[first : first + n], of reals or int64; what is not there stays so. Not to be a result, since
 * the handle is that of x. */
Tensor item_of(const Tensor *x, int64_t i);
Tensor items_of(const Tensor *x, int64_t first, int64_t n);
/* Deletes what was taken or made since n_owned was `first`: what one step of a loop needs. */
void release(Call *call, int first);
/* Memory for a kernel's intermediate values, on the device of `like`, freed by finish(); aligned to 64 bytes. NULL for 0. */
void *new_scratch(Call *call, const Tensor *like, int64_t bytes);
/* Whether the launchers do the work: x is on a GPU, or this build runs them on the CPU (tests/emulation). */
bool on_cuda(const Tensor *x);

/* On the CPU the float32 or float64 kernel over n items on torch's threads, at least `grain` items each; in place for small n.
 * On the GPU the launcher, on torch's current stream. */
void run(Call *call, const Tensor *x, Kernels kernels, void *parameters, int64_t n, int64_t grain);
/* Part i of a call, with a Call of its own, whose tensors are deleted when it returns. */
typedef void Part(Call *call, int64_t i, void *parameters);
/* All n parts, on torch's threads, or one after the other, each on as many threads as it takes; the first failure is kept. */
void run_parts(Call *call, Part *part, void *parameters, int64_t n, bool in_order);
/* Whether torch has more than n threads for a call. */
bool has_threads(int64_t n);
/* Deletes every argument and temporary, leaves the results in the stack or throws. A result must not be an argument. */
void finish(Call *call, StableIValue *stack, int n_results, const Tensor *results);

typedef struct Operator {
    const char *name, *schema;
    void (*boxed)(StableIValue *, uint64_t, uint64_t);
    struct Operator *next;
} Operator;
void add_operator(Operator *op);

#ifdef __cplusplus
extern "C" {
#endif
/* Hands every operator to torch, once; NULL, or what went wrong. */
const char *mdps_register(void);
/* Tensor handles that operators own at this moment: 0 between calls, or something leaks. */
int64_t mdps_live_handles(void);
/* In module.cpp, the one thing that C cannot do: `delete` of a cell that torch < 2.13 made with C++ `new`. */
void mdps_delete_cell(StableIValue *cell);
#ifdef __cplusplus
}
#endif

/* Links the operator into a list when the library is loaded; mdps_register() hands the list to torch. */
#define OPERATOR(NAME, SCHEMA, BOXED)                            \
    static Operator NAME##_operator = {#NAME, SCHEMA, BOXED, 0}; \
    __attribute__((constructor)) static void NAME##_add(void) { add_operator(&NAME##_operator); }

#endif
