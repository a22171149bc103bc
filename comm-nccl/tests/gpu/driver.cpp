// A driver of GPUs that are not there, one unless STAND_IN_DEVICES says how many. What the backend asks about a device is answered as an
// H100 would. At the end it writes how often it was asked for what, and the names of the kernels, into the file that STAND_IN_COUNTS names.
//
// With STAND_IN_COMPUTES unset addresses stand for no memory, kernels do nothing, and what is read back is zeros. With it set memory is the
// process's, and a kernel is a shared library (gpt2/tests/gpu/compiler.cpp) that is run on the processor. Its value says when what was put
// into a stream is done: `at-once`, before the call returns; or `late`, not before somebody waits for it, so that whatever is not ordered by a
// wait comes out of order. Who only asks whether it is done finds one operation more done. `late` also runs blocks in the reverse order, and
// the threads of a block in either by turns. New and freed memory is filled with bytes that are no number in any floating-point type.
//
// Faults: a device has STAND_IN_MEMORY bytes; STAND_IN_CONTEXT is the error with which its context is refused; after STAND_IN_LOST_AT
// launches, without those that are skipped (STAND_IN_MOST_BLOCKS), every call says that the device is lost.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <dlfcn.h>

namespace {

using Address = unsigned long long;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, NOT_FOUND = 500, NOT_READY = 600, LOST = 700 };

std::recursive_mutex &lock = *new std::recursive_mutex;
using Locked = std::lock_guard<std::recursive_mutex>;

const char *mode() {
    static const char *mode = std::getenv("STAND_IN_COMPUTES");
    return mode;
}
bool computes() { return mode() != nullptr; }
bool late() { return computes() && std::strcmp(mode(), "late") == 0; }

// What threads may still use when the process ends is not taken down.
struct Counts {
    unsigned long long launches, allocated, most_allocated, uploaded, read_back, waits, skipped;
    std::vector<std::string> kernels;
    std::set<std::string> skipped_kernels;
} &counts = *new Counts();

__attribute__((destructor)) void write_counts() {
    const char *path = std::getenv("STAND_IN_COUNTS");
    FILE *file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    Locked held(lock);
    std::fprintf(file,
                 "{\"modules\": %zu, \"launches\": %llu, \"skipped\": %llu, \"most_allocated\": %llu, \"uploaded\": %llu, "
                 "\"read_back\": %llu, \"waits\": %llu,\n\"kernels\": [",
                 counts.kernels.size(), counts.launches, counts.skipped, counts.most_allocated, counts.uploaded, counts.read_back, counts.waits);
    const char *between = "";
    for (auto &name : counts.kernels) std::fprintf(file, "%s\"%s\"", between, name.c_str()), between = ", ";
    std::fprintf(file, "],\n\"skipped_kernels\": [");
    between = "";
    for (auto &name : counts.skipped_kernels) std::fprintf(file, "%s\"%s\"", between, name.c_str()), between = ", ";
    std::fprintf(file, "]}\n");
    std::fclose(file);
}

unsigned long long variable(const char *name, unsigned long long otherwise) {
    const char *text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

/// What a call that has done what it was asked to says, now that `code` is how that went.
int status(int code = SUCCESS) {
    static unsigned long long lost_at = variable("STAND_IN_LOST_AT", ~0ull);
    Locked held(lock);
    return counts.launches - counts.skipped >= lost_at ? LOST : code;
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

/// What was put into it, in order; an operation says whether it is done, and is asked again while it is not.
struct Stream {
    std::deque<std::function<bool()>> waiting;
    uint64_t put = 0, done = 0;
    // What was put up to the last operation that exchanges messages.
    uint64_t messages = 0;
    bool running = false;
};

std::vector<Stream *> &streams = *new std::vector<Stream *>;

/// Does what is in a stream, up to its first `upto` operations, as far as it goes now.
bool advance(Stream &stream, uint64_t upto) {
    // An operation that asks for its own stream finds what comes before it done.
    if (stream.running) return stream.done >= upto;
    stream.running = true;
    while (stream.done < upto && stream.waiting.front()()) {
        stream.waiting.pop_front();
        stream.done++;
    }
    stream.running = false;
    return stream.done >= upto;
}

/// The same, and where it waits for other processes, the messages that they may wait for in turn.
bool advance_all(Stream &stream, uint64_t upto) {
    if (advance(stream, upto)) return true;
    for (Stream *other : streams) advance(*other, other->messages);
    return advance(stream, upto);
}

Stream &stream_of(void *handle) {
    static Stream *none = [] {
        streams.push_back(new Stream);
        return streams.back();
    }();
    return handle ? *static_cast<Stream *>(handle) : *none;
}

void put(void *handle, std::function<bool()> operation, bool messages = false) {
    Locked held(lock);
    Stream &stream = stream_of(handle);
    stream.waiting.push_back(std::move(operation));
    stream.put++;
    if (messages) stream.messages = stream.put;
    if (!late()) advance(stream, stream.put);
}

/// For somebody who asks and does not wait.
int query(Stream &stream, uint64_t upto) {
    advance_all(stream, late() && stream.done + 1 < upto ? stream.done + 1 : upto);
    return stream.done >= upto ? SUCCESS : NOT_READY;
}

/// Not under the lock while nothing moves: other threads may have to put something in.
int wait(Stream &stream, uint64_t upto) {
    for (;;) {
        {
            Locked held(lock);
            if (advance_all(stream, upto)) return SUCCESS;
        }
        timespec pause = {0, 100000};
        nanosleep(&pause, nullptr);
    }
}

int wait_whole(void *handle) {
    uint64_t upto;
    Stream *stream;
    {
        Locked held(lock);
        counts.waits++;
        stream = &stream_of(handle);
        upto = stream->put;
    }
    return wait(*stream, upto);
}

int wait_for_all() {
    std::vector<std::pair<Stream *, uint64_t>> all;
    {
        Locked held(lock);
        for (Stream *stream : streams) all.push_back({stream, stream->put});
    }
    for (auto &[stream, upto] : all) wait(*stream, upto);
    return SUCCESS;
}

struct Event {
    Stream *stream;
    uint64_t upto;
    double at;
};

// Blocks of memory by their addresses.
std::map<Address, size_t> &blocks = *new std::map<Address, size_t>, &pinned = *new std::map<Address, size_t>;
Address next_address = 1ull << 40;

/// At most this many bytes of a block are filled; the backend asks for large ones.
constexpr size_t FILLED = 64 << 20;

void poison(Address at, size_t bytes) { std::memset(reinterpret_cast<void *>(at), 0xff, bytes < FILLED ? bytes : FILLED); }

bool is_pinned(const void *at) {
    auto next = pinned.upper_bound(reinterpret_cast<Address>(at));
    if (next == pinned.begin()) return false;
    --next;
    return reinterpret_cast<Address>(at) < next->first + next->second;
}

int free_block(Address at) {
    Locked held(lock);
    auto block = blocks.find(at);
    if (block == blocks.end()) return at == 0 ? SUCCESS : INVALID_VALUE;
    counts.allocated -= block->second;
    if (computes()) {
        poison(at, block->second);
        std::free(reinterpret_cast<void *>(at));
    }
    blocks.erase(block);
    return SUCCESS;
}

struct Kernel {
    std::string name;
    void *(*copy)(void **);
    void (*run)(void *, const unsigned *, const unsigned *, size_t, bool);
};

void copy_between(Address to, Address from, size_t bytes) {
    std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
}

} // namespace

extern "C" {

/// For what else puts work into streams: `operation(data)` is asked until it says 1.
void stand_in_put(void *stream, int (*operation)(void *), void *data) {
    put(stream, [=] { return operation(data) != 0; }, true);
}

/// While no operation is under way.
void stand_in_between(void (*work)(void *), void *data) {
    Locked held(lock);
    work(data);
}

// The device.
int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int *version) { return *version = 13990, SUCCESS; }
int cuDeviceGetCount(int *devices) {
    return *devices = variable("STAND_IN_DEVICES", 1), SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) {
    int devices;
    cuDeviceGetCount(&devices);
    return *device = ordinal, ordinal >= 0 && ordinal < devices ? SUCCESS : INVALID_DEVICE;
}
int cuDeviceGetName(char *name, int size, int) { return std::snprintf(name, size, "NVIDIA H100 that is not there"), SUCCESS; }
int cuDeviceTotalMem_v2(size_t *bytes, int) {
    static unsigned long long all = variable("STAND_IN_MEMORY", (computes() ? 4ull : 80ull) << 30);
    return *bytes = all, SUCCESS;
}
int cuDeviceGetPCIBusId(char *id, int size, int device) { return std::snprintf(id, size, "0000:%02x:00.0", device + 1), SUCCESS; }
int cuDeviceGetUuid(void *id, int device) { return std::memset(id, device + 1, 16), SUCCESS; }
int cuDeviceGetUuid_v2(void *id, int device) { return cuDeviceGetUuid(id, device); }

int cuMemGetInfo_v2(size_t *left, size_t *all) {
    Locked held(lock);
    cuDeviceTotalMem_v2(all, 0);
    *left = *all > counts.allocated ? *all - counts.allocated : 0;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break; // threads of a block, along x and y
    case 4: *value = 64; break;                   // along z
    case 5: *value = 2147483647; break;           // blocks along x
    case 6: case 7: *value = 65535; break;        // along y and z
    case 8: *value = 49152; break;                // bytes that a block shares
    case 10: *value = 32; break;                  // threads of a warp
    case 12: *value = 65536; break;               // registers of a block
    case 16: *value = 132; break;                 // multiprocessors
    case 75: *value = 9; break;                   // compute capability
    case 97: *value = 232448; break;              // bytes that a block shares if it asks for it
    case 115: *value = 1; break;                  // pools of memory
    default: *value = 0;
    }
    return SUCCESS;
}

int cuGetErrorString(int code, const char **text) {
    thread_local char line[64];
    std::snprintf(line, sizeof line, "error %d of the stand-in", code);
    return *text = line, SUCCESS;
}
int cuGetErrorName(int, const char **text) { return *text = "CUDA_ERROR_STAND_IN", SUCCESS; }

// Contexts, streams and events.
int cuDevicePrimaryCtxRetain(void **context, int) { return *context = &counts, variable("STAND_IN_CONTEXT", SUCCESS); }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxSetCurrent(void *) { return SUCCESS; }
int cuCtxGetCurrent(void **context) { return *context = &counts, SUCCESS; }
int cuCtxSynchronize() { return status(wait_for_all()); }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }

int cuStreamCreate(void **stream, unsigned) {
    Locked held(lock);
    streams.push_back(new Stream);
    return *stream = streams.back(), status();
}
int cuStreamCreateWithPriority(void **stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
/// What is in it still runs.
int cuStreamDestroy_v2(void *) { return SUCCESS; }
int cuStreamSynchronize(void *stream) { return status(wait_whole(stream)); }
int cuStreamQuery(void *stream) {
    Locked held(lock);
    Stream &it = stream_of(stream);
    return status(query(it, it.put));
}

int cuStreamWaitEvent(void *stream, void *event, unsigned) {
    Event recorded = *static_cast<Event *>(event);
    // One that was never recorded is nothing to wait for.
    if (recorded.stream) put(stream, [=] { return advance(*recorded.stream, recorded.upto); });
    return SUCCESS;
}

int cuEventCreate(void **event, unsigned) { return *event = new Event{nullptr, 0, 0}, SUCCESS; }
int cuEventDestroy_v2(void *event) { return delete static_cast<Event *>(event), SUCCESS; }

int cuEventRecord(void *event, void *stream) {
    Locked held(lock);
    Event &it = *static_cast<Event *>(event);
    it.stream = &stream_of(stream);
    it.upto = it.stream->put;
    it.at = now();
    return SUCCESS;
}

int cuEventQuery(void *event) {
    Locked held(lock);
    Event &it = *static_cast<Event *>(event);
    return status(it.stream ? query(*it.stream, it.upto) : int(SUCCESS));
}

int cuEventSynchronize(void *event) {
    Event it;
    {
        Locked held(lock);
        counts.waits++;
        it = *static_cast<Event *>(event);
    }
    return status(it.stream ? wait(*it.stream, it.upto) : int(SUCCESS));
}

int cuEventElapsedTime_v2(float *ms, void *start, void *end) {
    return *ms = static_cast<Event *>(end)->at - static_cast<Event *>(start)->at, SUCCESS;
}
int cuEventElapsedTime(float *ms, void *start, void *end) { return cuEventElapsedTime_v2(ms, start, end); }

// Memory.
int cuMemAlloc_v2(Address *at, size_t bytes) {
    Locked held(lock);
    size_t left, all;
    cuMemGetInfo_v2(&left, &all);
    if (bytes > left) return OUT_OF_MEMORY;
    if (computes()) {
        void *block = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
        if (!block) return OUT_OF_MEMORY;
        *at = reinterpret_cast<Address>(block);
        poison(*at, bytes);
    } else {
        *at = next_address;
        next_address += (bytes + 4095) / 4096 * 4096;
    }
    blocks[*at] = bytes;
    counts.allocated += bytes;
    if (counts.allocated > counts.most_allocated) counts.most_allocated = counts.allocated;
    return SUCCESS;
}

/// Waits for the device, as the real one does.
int cuMemFree_v2(Address at) { return wait_for_all(), free_block(at); }
int cuMemAllocAsync(Address *at, size_t bytes, void *) { return cuMemAlloc_v2(at, bytes); }
int cuMemFreeAsync(Address at, void *stream) { return put(stream, [=] { return free_block(at), true; }), SUCCESS; }

int cuMemAllocHost_v2(void **at, size_t bytes) {
    Locked held(lock);
    *at = std::malloc(bytes);
    if (!*at) return OUT_OF_MEMORY;
    pinned[reinterpret_cast<Address>(*at)] = bytes;
    if (computes()) poison(reinterpret_cast<Address>(*at), bytes);
    return SUCCESS;
}
int cuMemHostAlloc(void **at, size_t bytes, unsigned) { return cuMemAllocHost_v2(at, bytes); }
int cuMemFreeHost(void *at) {
    wait_for_all();
    Locked held(lock);
    pinned.erase(reinterpret_cast<Address>(at));
    return std::free(at), SUCCESS;
}

int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) {
    Locked held(lock);
    counts.uploaded += bytes;
    if (!computes()) return SUCCESS;
    if (is_pinned(from)) return put(stream, [=] { return std::memcpy(reinterpret_cast<void *>(to), from, bytes), true; }), SUCCESS;
    // What is not page-locked is read before the call returns.
    auto copy = std::vector<char>(static_cast<const char *>(from), static_cast<const char *>(from) + bytes);
    put(stream, [=] { return std::memcpy(reinterpret_cast<void *>(to), copy.data(), bytes), true; });
    return status();
}

int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) {
    bool locked_page;
    {
        Locked held(lock);
        counts.read_back += bytes;
        if (!computes()) return std::memset(to, 0, bytes), SUCCESS;
        locked_page = is_pinned(to);
        put(stream, [=] { return std::memcpy(to, reinterpret_cast<void *>(from), bytes), true; });
    }
    // Into what is not page-locked it is there when the call returns.
    return status(locked_page ? int(SUCCESS) : wait_whole(stream));
}

int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void *stream) {
    if (computes()) put(stream, [=] { return copy_between(to, from, bytes), true; });
    return SUCCESS;
}

/// `CUDA_MEMCPY2D`.
struct Copy2d {
    struct Side {
        size_t x, y;
        unsigned kind;
        const void *host;
        Address device;
        void *array;
        size_t pitch;
    } from, to;
    size_t width, height;
};

int cuMemcpy2DAsync_v2(const Copy2d *copy, void *stream) {
    if (!computes()) return SUCCESS;
    Copy2d it = *copy;
    auto at = [](const Copy2d::Side &side) {
        Address first = side.kind == 1 ? reinterpret_cast<Address>(side.host) : side.device;
        return first + side.y * side.pitch + side.x;
    };
    if (it.from.kind > 2 || it.to.kind > 2) return INVALID_VALUE;
    put(stream, [=] {
        for (size_t y = 0; y < it.height; y++) copy_between(at(it.to) + y * it.to.pitch, at(it.from) + y * it.from.pitch, it.width);
        return true;
    });
    bool host = (it.from.kind == 1 && !is_pinned(it.from.host)) || (it.to.kind == 1 && !is_pinned(it.to.host));
    return host ? wait_whole(stream) : SUCCESS;
}

int cuMemsetD8Async(Address at, unsigned char value, size_t bytes, void *stream) {
    if (computes()) put(stream, [=] { return std::memset(reinterpret_cast<void *>(at), value, bytes), true; });
    return SUCCESS;
}

// Kernels.
int cuModuleLoadData(void **module, const void *image) {
    if (!computes()) return *module = &counts, SUCCESS;
    // The path of a library that holds one kernel.
    void *library = dlopen(static_cast<const char *>(image), RTLD_NOW | RTLD_LOCAL);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), INVALID_IMAGE;
    return *module = library, SUCCESS;
}
int cuModuleUnload(void *) { return SUCCESS; }

int cuModuleGetFunction(void **function, void *module, const char *name) {
    Locked held(lock);
    counts.kernels.push_back(name);
    if (!computes()) return *function = module, SUCCESS;
    auto kernel = new Kernel{name, nullptr, nullptr};
    kernel->copy = reinterpret_cast<decltype(kernel->copy)>(dlsym(module, "stand_in_copy"));
    kernel->run = reinterpret_cast<decltype(kernel->run)>(dlsym(module, "stand_in_run"));
    if (!kernel->copy || !kernel->run) return NOT_FOUND;
    return *function = kernel, SUCCESS;
}

int cuFuncSetAttribute(void *, int, int) { return SUCCESS; }
int cuTensorMapEncodeTiled(void *) { return SUCCESS; }
int cuTensorMapEncodeIm2col(void *) { return SUCCESS; }

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared, void *stream, void **arguments, void **) {
    Locked held(lock);
    counts.launches++;
    if (!computes() || status() != SUCCESS) return status();
    // The yardstick of utilisation takes large products, which would take a processor minutes and are worth nothing.
    static unsigned long long most = variable("STAND_IN_MOST_BLOCKS", ~0ull);
    const Kernel &kernel = *static_cast<Kernel *>(function);
    if (1ull * grid_x * grid_y * grid_z > most) return counts.skipped++, counts.skipped_kernels.insert(kernel.name), SUCCESS;
    void *copied = kernel.copy(arguments);
    auto run = kernel.run;
    put(stream, [=] {
        unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
        return run(copied, grid, block, shared, late()), true;
    });
    return SUCCESS;
}

} // extern "C"
