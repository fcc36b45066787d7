/* Includes MDPS_FILE twice: with REAL = float and FN(name) = name_f32, then with double and name_f64. */
#define FN(name) FN_(name, SUFFIX)
#define FN_(name, suffix) FN__(name, suffix)
#define FN__(name, suffix) name##_##suffix
#define REAL float
#define SUFFIX f32
#include MDPS_FILE
#undef REAL
#undef SUFFIX
#define REAL double
#define SUFFIX f64
#include MDPS_FILE
#undef REAL
#undef SUFFIX
