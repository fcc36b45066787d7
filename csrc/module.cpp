// The Python module mdps._C: registers the operators, tells how it was built. Nothing of torch is used here.
#include <pybind11/pybind11.h>

#include "operator.h"

extern "C" void mdps_delete_cell(StableIValue *cell) { delete cell; }

PYBIND11_MODULE(_C, m) {
    m.doc() = "The compiled half of mdps: see csrc/ and kernels/.";
    m.def("register", [] {
        if (const char *error = mdps_register()) throw pybind11::import_error(std::string("mdps: ") + error);
    });
    m.def("live_handles", &mdps_live_handles, "Tensor handles that operators own at this moment.");
    m.def("build_info", [] {
        const uint64_t torch = aoti_torch_abi_version();
        pybind11::dict info;
        info["version"] = MDPS_VERSION;
        info["compiler"] = __VERSION__;
        info["python"] = PY_VERSION;
        info["torch"] = std::to_string(torch >> 56) + "." + std::to_string(torch >> 48 & 255);
        info["cuda"] = MDPS_CUDA ? MDPS_CUDA_VERSION : "";
        info["cuda_architectures"] = MDPS_CUDA ? MDPS_CUDA_ARCHITECTURES : "";
        info["emulated"] = MDPS_EMULATE != 0; // tests/emulation
        return info;
    });
}
