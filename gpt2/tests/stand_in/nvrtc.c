/* NVIDIA's compiler of kernels, which STAND_IN_NVRTC names, under the name by which the backend looks for it. Appends to the file that
 * STAND_IN_COMPILED names how many seconds each kernel took, and 0 where it went well. */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void *real(const char *name) {
    static void *library;
    if (!library) library = dlopen(getenv("STAND_IN_NVRTC"), RTLD_NOW | RTLD_GLOBAL);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    return function;
}

#define HAND_ON(name, parameters, arguments) \
    int name parameters { return ((int(*) parameters)real(#name)) arguments; }

HAND_ON(nvrtcVersion, (int *major, int *minor), (major, minor))
HAND_ON(nvrtcCreateProgram, (void **program, const char *source, const char *name, int count, const char *const *headers, const char *const *names),
        (program, source, name, count, headers, names))
HAND_ON(nvrtcDestroyProgram, (void **program), (program))
HAND_ON(nvrtcGetPTXSize, (void *program, size_t *bytes), (program, bytes))
HAND_ON(nvrtcGetPTX, (void *program, char *text), (program, text))
HAND_ON(nvrtcGetProgramLogSize, (void *program, size_t *bytes), (program, bytes))
HAND_ON(nvrtcGetProgramLog, (void *program, char *text), (program, text))

const char *nvrtcGetErrorString(int code) { return ((const char *(*)(int))real("nvrtcGetErrorString"))(code); }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    double start = now();
    int code = ((int (*)(void *, int, const char *const *))real("nvrtcCompileProgram"))(program, count, options);
    const char *path = getenv("STAND_IN_COMPILED");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%.4f %d\n", now() - start, code);
        fclose(file);
    }
    return code;
}
