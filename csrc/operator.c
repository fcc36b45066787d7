/* See operator.h. */
#include "operator.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static atomic_llong live_handles;

int64_t mdps_live_handles(void) { return atomic_load(&live_handles); }

void fail(Call *call, const char *format, ...) {
    if (!ok(call)) return;
    int n = snprintf(call->error, sizeof call->error, "mdps.%s: ", call->op);
    va_list args;
    va_start(args, format);
    vsnprintf(call->error + n, sizeof call->error - n, format, args);
    va_end(args);
}

/* A torch function failed: before torch 2.13 its text goes to stderr only. */
static void fail_in_torch(Call *call, const char *what) {
    fail(call, "%s: %s", what,
         torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace()
                                                    : "failed in torch, see stderr");
}

static void delete_handle(AtenTensorHandle handle) {
    aoti_torch_delete_tensor_object(handle);
    atomic_fetch_sub_explicit(&live_handles, 1, memory_order_relaxed);
}

static Tensor own(Call *call, AtenTensorHandle handle) {
    Tensor x = {.handle = handle};
    atomic_fetch_add_explicit(&live_handles, 1, memory_order_relaxed);
    if (call->n_owned < MAX_OWNED) call->owned[call->n_owned++] = handle;
    else fail(call, "more than %d tensors", MAX_OWNED), delete_handle(handle), x.handle = NULL;
    return x;
}

static Tensor allocate(Call *call, const Tensor *like, int dim, const int64_t *size, int32_t dtype) {
    if (!ok(call)) return (Tensor){0};
    int64_t stride[MAX_DIM], step = 1;
    for (int d = dim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= size[d] > 1 ? size[d] : 1;
    }
    AtenTensorHandle handle = NULL;
    if (aoti_torch_empty_strided(dim, size, stride, dtype, like->device_type, like->device_index, &handle)) {
        fail_in_torch(call, "allocation");
        return (Tensor){0};
    }
    Tensor x = own(call, handle);
    if (ok(call) && torch_get_mutable_data_ptr(handle, &x.data)) fail_in_torch(call, "allocation");
    if (!ok(call)) return (Tensor){0};
    memcpy(x.size, size, dim * sizeof *size);
    x.dim = dim;
    x.dtype = dtype;
    x.device_type = like->device_type;
    x.device_index = like->device_index;
    x.is_double = like->is_double;
    return x;
}

Tensor new_tensor(Call *call, const Tensor *like, int dim, const int64_t *size) {
    return allocate(call, like, dim, size, like->dtype);
}

Tensor new_indices(Call *call, const Tensor *like, int dim, const int64_t *size) {
    return allocate(call, like, dim, size, aoti_torch_dtype_int64());
}

Tensor item_of(const Tensor *x, int64_t i) {
    if (!x->handle) return *x;
    Tensor y = items_of(x, i, 1);
    y.dim--;
    memmove(y.size, y.size + 1, y.dim * sizeof *y.size);
    return y;
}

Tensor items_of(const Tensor *x, int64_t first, int64_t n) {
    if (!x->handle) return *x;
    Tensor y = *x;
    int64_t bytes = x->dtype == aoti_torch_dtype_float32() ? 4 : 8;
    for (int64_t d = 1; d < y.dim; d++) bytes *= y.size[d];
    y.size[0] = n;
    if (x->data) y.data = (char *)x->data + first * bytes;
    return y;
}

void release(Call *call, int first) {
    while (call->n_owned > first) delete_handle(call->owned[--call->n_owned]);
}

void *new_scratch(Call *call, const Tensor *like, int64_t bytes) {
    if (bytes == 0) return NULL;
    Tensor x = allocate(call, like, 1, (int64_t[]){bytes / 8 + 9}, aoti_torch_dtype_int64());
    return (void *)(((uintptr_t)x.data + 63) & ~(uintptr_t)63);
}

static Tensor contiguous(Call *call, const Tensor *x) {
    Tensor copy = new_tensor(call, x, (int)x->dim, x->size);
    if (ok(call) && aoti_torch_copy_(copy.handle, x->handle, 0)) fail_in_torch(call, "copy");
    return copy;
}

typedef enum { REALS, INDICES, FLAGS } Kind;

static bool has_kind(const Tensor *x, Kind kind) {
    if (kind == INDICES) return x->dtype == aoti_torch_dtype_int64();
    if (kind == FLAGS) return x->dtype == aoti_torch_dtype_bool();
    return x->is_double || x->dtype == aoti_torch_dtype_float32();
}

static Tensor take(Call *call, StableIValue value, const char *name, int least_dim, int most_dim, Kind kind) {
    Tensor x = own(call, (AtenTensorHandle)(uintptr_t)value);
    if (!ok(call)) return (Tensor){0};
    int64_t *size = NULL;
    bool is_contiguous = false;
    if (aoti_torch_get_dim(x.handle, &x.dim) || aoti_torch_get_sizes(x.handle, &size) ||
        aoti_torch_get_dtype(x.handle, &x.dtype) || aoti_torch_get_device_type(x.handle, &x.device_type) ||
        aoti_torch_get_device_index(x.handle, &x.device_index) || aoti_torch_is_contiguous(x.handle, &is_contiguous)) {
        fail_in_torch(call, name);
        return (Tensor){0};
    }
    x.is_double = x.dtype == aoti_torch_dtype_float64();
    expect(call, x.dim >= least_dim && x.dim <= most_dim, "%s: expected %d dimensions, got %lld", name, most_dim,
           (long long)x.dim);
    const char *words[] = {"float32 or float64", "int64", "bool"};
    expect(call, has_kind(&x, kind), "%s: expected dtype %s", name, words[kind]);
    if (!ok(call)) return (Tensor){0};
    memcpy(x.size, size, x.dim * sizeof *size);
    if (!is_contiguous) return contiguous(call, &x);
    if (torch_get_const_data_ptr(x.handle, (const void **)&x.data)) fail_in_torch(call, name);
    return ok(call) ? x : (Tensor){0};
}

Tensor take_tensor(Call *call, StableIValue value, const char *name, int dim) {
    return take(call, value, name, dim, dim, REALS);
}
Tensor take_indices(Call *call, StableIValue value, const char *name, int dim) {
    return take(call, value, name, dim, dim, INDICES);
}
Tensor take_flags(Call *call, StableIValue value, const char *name, int dim) {
    return take(call, value, name, dim, dim, FLAGS);
}

Tensor take_shared_tensor(Call *call, StableIValue value, const char *name, int dim) {
    return take(call, value, name, dim - 1, dim, REALS);
}

Tensor take_shared_indices(Call *call, StableIValue value, const char *name, int dim) {
    return take(call, value, name, dim - 1, dim, INDICES);
}

void expect_like(Call *call, const Tensor *x, const char *x_name, const Tensor *y, const char *y_name) {
    expect(call, x->dtype == y->dtype || has_kind(x, INDICES) || has_kind(x, FLAGS), "%s: expected the dtype of %s", x_name,
           y_name);
    expect(call, x->device_type == y->device_type && x->device_index == y->device_index, "%s: expected the device of %s",
           x_name, y_name);
}

void expect_size(Call *call, const Tensor *x, const char *name, int dim, const int64_t *size) {
    for (int64_t d = dim - x->dim, i = 0; ok(call) && i < x->dim; i++, d++)
        expect(call, x->size[i] == size[d], "%s: expected size %lld in dimension %lld, got %lld", name, (long long)size[d],
               (long long)i, (long long)x->size[i]);
}

bool take_optional(StableIValue value, StableIValue *inner) {
    StableIValue *cell = (StableIValue *)(uintptr_t)value;
    if (!cell) return false;
    *inner = *cell;
    if (torch_delete_stable_ivalue) torch_delete_stable_ivalue(cell);
    else mdps_delete_cell(cell); /* until torch 2.13 the cell comes from C++ new */
    return true;
}

int take_ints(Call *call, StableIValue value, const char *name, int max, int64_t *items) {
    StableListHandle list = (StableListHandle)(uintptr_t)value;
    size_t n = 0;
    if (torch_list_size(list, &n)) fail_in_torch(call, name);
    expect(call, n <= (size_t)max, "%s: expected at most %d items, got %zu", name, max, n);
    for (size_t i = 0; ok(call) && i < n; i++)
        if (torch_list_get_item(list, i, (StableIValue *)&items[i])) fail_in_torch(call, name);
    torch_delete_list(list);
    return ok(call) ? (int)n : 0;
}

int take_floats(Call *call, StableIValue value, const char *name, double *items) {
    int64_t bits[MAX_FLOATS];
    int n = take_ints(call, value, name, MAX_FLOATS, bits);
    for (int i = 0; i < n; i++) items[i] = take_float((StableIValue)bits[i]);
    return n;
}

int take_n_angular(Call *call, StableIValue value, int64_t dim) {
    int64_t n = take_int(value);
    expect(call, dim >= 1 && dim <= 16, "expected 1 to 16 state dimensions, got %lld", (long long)dim);
    expect(call, n >= 0 && n <= dim, "n_angular: expected 0 to %lld, got %lld", (long long)dim, (long long)n);
    return ok(call) ? (int)n : 0;
}

bool on_cuda(const Tensor *x) { return MDPS_EMULATE || x->device_type == aoti_torch_device_type_cuda(); }

/* On torch's current stream of the device of x, made current for as long; waits for nothing. */
static void launch(Call *call, const Tensor *x, Launcher *launcher, const void *parameters, int64_t n) {
    void *stream = NULL;
    DeviceGuardHandle guard = NULL;
    const bool is_gpu = !MDPS_EMULATE;
    expect(call, MDPS_CUDA || MDPS_EMULATE, "this mdps has no CUDA kernels: install it where nvcc is, with MDPS_CUDA=ON");
    if (!ok(call)) return;
    if (is_gpu && (aoti_torch_get_current_cuda_stream(x->device_index, &stream) ||
                   aoti_torch_create_device_guard(x->device_index, &guard))) {
        fail_in_torch(call, "CUDA");
        return;
    }
    int status = cuda_select_device(x->device_index);
    if (!status) status = launcher(parameters, n, x->is_double, stream);
    expect(call, !status, "CUDA: %s", cuda_error_text(status));
    if (guard) aoti_torch_delete_device_guard(guard);
}

void run(Call *call, const Tensor *x, Kernels kernels, void *parameters, int64_t n, int64_t grain) {
    Kernel *kernel = x->is_double ? kernels.f64 : kernels.f32;
    if (!ok(call) || n == 0) return;
    if (on_cuda(x)) {
        if (kernels.cuda || !(MDPS_CUDA || MDPS_EMULATE)) launch(call, x, kernels.cuda, parameters, n);
    } else if (n <= grain) kernel(0, n, parameters);
    else if (torch_parallel_for(0, n, grain, kernel, parameters)) fail_in_torch(call, "threads");
}

typedef struct {
    Call *call;
    Part *part;
    void *parameters;
    atomic_flag failed;
} Parts;

static void run_some_parts(int64_t begin, int64_t end, void *parameters) {
    Parts *p = parameters;
    for (int64_t i = begin; i < end; i++) {
        Call call = {.op = p->call->op};
        p->part(&call, i, p->parameters);
        release(&call, 0);
        if (!ok(&call) && !atomic_flag_test_and_set(&p->failed)) memcpy(p->call->error, call.error, sizeof call.error);
    }
}

void run_parts(Call *call, Part *part, void *parameters, int64_t n, bool in_order) {
    Parts p = {call, part, parameters, ATOMIC_FLAG_INIT};
    if (!ok(call) || n == 0) return;
    if (in_order || n == 1) run_some_parts(0, n, &p);
    else if (torch_parallel_for(0, n, 1, run_some_parts, &p)) fail_in_torch(call, "threads");
}

bool has_threads(int64_t n) {
    uint32_t threads = 1;
    return !torch_get_num_threads(&threads) && threads > n;
}

void finish(Call *call, StableIValue *stack, int n_results, const Tensor *results) {
    bool good = ok(call);
    for (int i = 0; i < call->n_owned; i++) {
        bool is_result = false;
        for (int r = 0; good && r < n_results; r++) is_result |= call->owned[i] == results[r].handle;
        if (!is_result) delete_handle(call->owned[i]);
    }
    if (!good) aoti_torch_check(false, call->op, "mdps", 0, call->error); /* does not return */
    for (int r = 0; r < n_results; r++) stack[r] = (StableIValue)(uintptr_t)results[r].handle;
    atomic_fetch_sub_explicit(&live_handles, n_results, memory_order_relaxed);
}

/* Registration */

static Operator *operators;

void add_operator(Operator *op) {
    op->next = operators;
    operators = op;
}

const char *mdps_register(void) {
    static bool done;
    if (done) return NULL;
    TorchLibraryHandle def, cpu, cuda = NULL; /* never deleted: that would unregister */
    if (aoti_torch_library_init_def("mdps", "mdps", 1, &def)) return "a second copy of mdps is loaded in this process";
    if (aoti_torch_library_init_impl("mdps", "CPU", "mdps", 1, &cpu)) return "cannot register CPU kernels";
    bool torch_has_cuda = aoti_torch_get_current_cuda_stream != NULL;
    if (torch_has_cuda && aoti_torch_library_init_impl("mdps", "CUDA", "mdps", 1, &cuda)) return "cannot register CUDA kernels";
    for (Operator *op = operators; op; op = op->next) {
        if (aoti_torch_library_def(def, op->schema)) return op->schema;
        if (torch_library_impl(cpu, op->name, op->boxed, TORCH_C_BUILD_VERSION)) return op->name;
        if (cuda && torch_library_impl(cuda, op->name, op->boxed, TORCH_C_BUILD_VERSION)) return op->name;
    }
    done = true;
    return NULL;
}
