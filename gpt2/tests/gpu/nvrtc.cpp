// NVIDIA's compiler of kernels, which STAND_IN_NVRTC names, under the name by which the backend looks for it. Appends to the file that
// STAND_IN_COMPILED names how many seconds each kernel took, and 0 where it went well.

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include <dlfcn.h>

namespace {

template <class Function> Function *real(const char *name, Function *) {
    static void *library = dlopen(std::getenv("STAND_IN_NVRTC"), RTLD_NOW | RTLD_GLOBAL);
    void *function = library ? dlsym(library, name) : nullptr;
    if (!function) std::fprintf(stderr, "%s\n", dlerror()), std::abort();
    return reinterpret_cast<Function *>(function);
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

} // namespace

#define HAND_ON(result, name, parameters, arguments) \
    result name parameters { return real(#name, name) arguments; }

extern "C" {

HAND_ON(int, nvrtcVersion, (int *major, int *minor), (major, minor))
HAND_ON(int, nvrtcCreateProgram,
        (void **program, const char *source, const char *name, int count, const char *const *headers, const char *const *names),
        (program, source, name, count, headers, names))
HAND_ON(int, nvrtcDestroyProgram, (void **program), (program))
HAND_ON(int, nvrtcGetPTXSize, (void *program, size_t *bytes), (program, bytes))
HAND_ON(int, nvrtcGetPTX, (void *program, char *text), (program, text))
HAND_ON(int, nvrtcGetProgramLogSize, (void *program, size_t *bytes), (program, bytes))
HAND_ON(int, nvrtcGetProgramLog, (void *program, char *text), (program, text))
HAND_ON(const char *, nvrtcGetErrorString, (int code), (code))

int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    double start = now();
    int code = real("nvrtcCompileProgram", nvrtcCompileProgram)(program, count, options);
    const char *path = std::getenv("STAND_IN_COMPILED");
    FILE *file = path ? std::fopen(path, "a") : nullptr;
    if (file) {
        std::fprintf(file, "%.4f %d\n", now() - start, code);
        std::fclose(file);
    }
    return code;
}

} // extern "C"
