/* A driver of one GPU that is not there: addresses stand for no memory, kernels do nothing, and what is read back is zeros. What the backend
 * asks about a device is answered as an H100 would. At the end it writes how often it was asked for what, and the names of the kernels, into
 * the file that STAND_IN_COUNTS names. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long Address;

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101 };

static unsigned long long modules, launches, allocated, most_allocated, uploaded, read_back, waits;
static char kernels[1 << 10][256];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((destructor)) static void write_counts(void) {
    const char *path = getenv("STAND_IN_COUNTS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "{\"modules\": %llu, \"launches\": %llu, \"most_allocated\": %llu, \"uploaded\": %llu, \"read_back\": %llu, \"waits\": %llu,\n",
            modules, launches, most_allocated, uploaded, read_back, waits);
    fprintf(file, "\"kernels\": [");
    for (unsigned long long i = 0; i < modules && i < sizeof kernels / sizeof *kernels; i++) fprintf(file, "%s\"%s\"", i ? ", " : "", kernels[i]);
    fprintf(file, "]}\n");
    fclose(file);
}

static void count(unsigned long long *what, unsigned long long by) { __sync_fetch_and_add(what, by); }

/* The device. */
int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13990; return SUCCESS; }
int cuDeviceGetCount(int *devices) { *devices = 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 0 ? SUCCESS : INVALID_DEVICE; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "NVIDIA H100 that is not there"); return SUCCESS; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80ull << 30; return SUCCESS; }
int cuMemGetInfo_v2(size_t *left, size_t *all) { *all = 80ull << 30; *left = *all - allocated; return SUCCESS; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { snprintf(id, size, "0000:01:00.0"); return SUCCESS; }
int cuDeviceGetUuid(void *id, int device) { memset(id, 1, 16); return SUCCESS; }
int cuDeviceGetUuid_v2(void *id, int device) { return cuDeviceGetUuid(id, device); }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;          /* threads of a block, along x and y */
    case 4: *value = 64; break;                            /* along z */
    case 5: *value = 2147483647; break;                    /* blocks along x */
    case 6: case 7: *value = 65535; break;                 /* along y and z */
    case 8: *value = 49152; break;                         /* bytes that a block shares */
    case 10: *value = 32; break;                           /* threads of a warp */
    case 12: *value = 65536; break;                        /* registers of a block */
    case 16: *value = 132; break;                          /* multiprocessors */
    case 75: *value = 9; break;                            /* compute capability */
    case 97: *value = 232448; break;                       /* bytes that a block shares if it asks for it */
    case 115: *value = 1; break;                           /* pools of memory */
    default: *value = 0;
    }
    return SUCCESS;
}

int cuGetErrorString(int code, const char **text) { *text = "an error of the stand-in"; return SUCCESS; }
int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR_STAND_IN"; return SUCCESS; }

/* Contexts, streams and events, which are all done at once. */
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &modules; return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxSetCurrent(void *context) { return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = &modules; return SUCCESS; }
int cuCtxSynchronize(void) { count(&waits, 1); return SUCCESS; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return SUCCESS; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
int cuStreamDestroy_v2(void *stream) { free(stream); return SUCCESS; }
int cuStreamSynchronize(void *stream) { count(&waits, 1); return SUCCESS; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }
int cuStreamQuery(void *stream) { return SUCCESS; }
int cuEventCreate(void **event, unsigned flags) { *event = calloc(1, sizeof(double)); return SUCCESS; }
int cuEventDestroy_v2(void *event) { free(event); return SUCCESS; }
int cuEventSynchronize(void *event) { count(&waits, 1); return SUCCESS; }
int cuEventQuery(void *event) { return SUCCESS; }

int cuEventRecord(void *event, void *stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(double *)event = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return SUCCESS;
}

int cuEventElapsedTime_v2(float *ms, void *start, void *end) {
    *ms = *(double *)end - *(double *)start;
    return SUCCESS;
}
int cuEventElapsedTime(float *ms, void *start, void *end) { return cuEventElapsedTime_v2(ms, start, end); }

/* Memory: addresses that are given out once, and how long each is for. */
struct Block { struct Block *next; Address at; size_t bytes; };
static struct Block *blocks;
static Address next_address = 1ull << 40;

int cuMemAlloc_v2(Address *at, size_t bytes) {
    struct Block *block = malloc(sizeof *block);
    if (!block) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    *at = next_address;
    next_address += (bytes + 4095) / 4096 * 4096;
    *block = (struct Block){blocks, *at, bytes};
    blocks = block;
    allocated += bytes;
    if (allocated > most_allocated) most_allocated = allocated;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuMemFree_v2(Address at) {
    pthread_mutex_lock(&lock);
    struct Block **link = &blocks;
    while (*link && (*link)->at != at) link = &(*link)->next;
    struct Block *block = *link;
    if (block) {
        *link = block->next;
        allocated -= block->bytes;
        free(block);
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuMemAllocAsync(Address *at, size_t bytes, void *stream) { return cuMemAlloc_v2(at, bytes); }
int cuMemFreeAsync(Address at, void *stream) { return cuMemFree_v2(at); }
int cuMemAllocHost_v2(void **at, size_t bytes) { *at = malloc(bytes); return *at ? SUCCESS : OUT_OF_MEMORY; }
int cuMemFreeHost(void *at) { free(at); return SUCCESS; }

int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) {
    count(&uploaded, bytes);
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) {
    count(&read_back, bytes);
    memset(to, 0, bytes);
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void *stream) { return SUCCESS; }
int cuMemcpy2DAsync_v2(const void *copy, void *stream) { return SUCCESS; }
int cuMemsetD8Async(Address at, unsigned char value, size_t bytes, void *stream) { return SUCCESS; }

/* Kernels. */
int cuModuleLoadData(void **module, const void *image) { *module = &modules; return SUCCESS; }
int cuModuleUnload(void *module) { return SUCCESS; }

/* A module holds one kernel. */
int cuModuleGetFunction(void **function, void *module, const char *name) {
    pthread_mutex_lock(&lock);
    if (modules < sizeof kernels / sizeof *kernels) snprintf(kernels[modules], sizeof *kernels, "%s", name);
    modules++;
    pthread_mutex_unlock(&lock);
    *function = module;
    return SUCCESS;
}

int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
int cuTensorMapEncodeTiled(void *map) { return SUCCESS; }
int cuTensorMapEncodeIm2col(void *map) { return SUCCESS; }

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra) {
    count(&launches, 1);
    return SUCCESS;
}
