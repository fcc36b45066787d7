/* What the .cu files offer to C: launchers, which put kernels on a stream and return a cudaError_t, 0 for success.
 *
 * A launcher gets the parameters that its .c twin gets, with device pointers, and does all n items; is_double chooses REAL. It
 * does not wait and does not allocate. Undefined without CUDA, hence weak then: no caller needs #if.
 */
#ifndef MDPS_CUDA_LAUNCH_H
#define MDPS_CUDA_LAUNCH_H

#if defined(__cplusplus)
#define LAUNCHER extern "C"
#elif MDPS_CUDA
#define LAUNCHER extern /* a missing definition shows at import */
#else
#define LAUNCHER extern __attribute__((weak))
#endif

/* The text of a status other than 0. */
LAUNCHER const char *cuda_error_text(int status);
/* Makes a device the current one of our own copy of the CUDA run-time. */
LAUNCHER int cuda_select_device(int index);

#endif
