// NCCL among processes of one machine whose driver is the stand-in (driver.cpp): what one rank sends to another is a file of the folder that
// STAND_IN_NCCL names. As NCCL's, its operations are put into a stream and done in its order, those of a group together.

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "numbers.hpp"

extern "C" void stand_in_put(void *stream, int (*operation)(void *), void *data);
extern "C" void stand_in_between(void (*work)(void *), void *data);

namespace {

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };
enum Type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, TYPES };
enum Op { SUM, PRODUCT, MAX, MIN, AVERAGE, OPS };
constexpr size_t SIZES[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

using Bytes = std::vector<char>;

struct Id {
    char bytes[128];
};

struct Comm {
    std::string name;
    int ranks, rank;
    bool aborted = false;
    // Messages sent to and received from each rank.
    std::vector<uint64_t> sent, received;
    // Factors of sums, in their own types, by the number of the operation.
    std::map<int, std::array<char, 8>> factors;
};

const char *folder() {
    const char *folder = std::getenv("STAND_IN_NCCL");
    if (!folder) std::fprintf(stderr, "stand-in NCCL: STAND_IN_NCCL is not set\n"), std::abort();
    return folder;
}

std::string file(const Comm &comm, uint64_t number, int from, int to) {
    return std::string(folder()) + "/" + comm.name + "-" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
}

void send_bytes(const Comm &comm, uint64_t number, int to, const char *bytes, size_t size) {
    std::string path = file(comm, number, comm.rank, to), part = path + ".part";
    int file = open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600);
    bool well = file >= 0;
    while (well && size > 0) {
        ssize_t wrote = write(file, bytes, size);
        well = wrote > 0;
        if (well) bytes += wrote, size -= wrote;
    }
    if (!well || close(file) != 0 || rename(part.c_str(), path.c_str()) != 0) std::perror(path.c_str()), std::abort();
}

[[noreturn]] void fail(const std::string &path) {
    std::perror(path.c_str());
    std::abort();
}

/// Whether the message is there.
bool receive_bytes(const Comm &comm, uint64_t number, int from, size_t size, Bytes &bytes) {
    std::string path = file(comm, number, from, comm.rank);
    int file = open(path.c_str(), O_RDONLY);
    if (file < 0 && errno == ENOENT) return false;
    if (file < 0) fail(path);
    bytes.resize(size + 1);
    size_t have = 0;
    for (ssize_t got; (got = read(file, bytes.data() + have, bytes.size() - have)) > 0;) have += got;
    close(file);
    if (have != size) std::fprintf(stderr, "stand-in NCCL: %s: %zu bytes instead of %zu\n", path.c_str(), have, size), std::abort();
    bytes.resize(size);
    unlink(path.c_str());
    return true;
}

/// One call: what it sends, of whom it receives how much, and what it makes of that.
struct Call {
    std::shared_ptr<Comm> comm;
    std::function<void()> begin;
    // A send ends when its receiver has it.
    bool until_received = false;
    std::vector<std::tuple<int, const char *, size_t>> sends;
    std::vector<std::pair<int, size_t>> receives;
    /// What came, in the order of `receives`.
    std::function<void(std::vector<Bytes> &)> end;
};

/// What one stream got in a group. Only what is done in a stream's order takes the numbers of messages.
struct Group {
    std::vector<Call> calls;
    bool begun = false;
    struct Incoming {
        uint64_t number;
        bool here;
    };
    std::vector<std::vector<Incoming>> incoming;
    std::vector<std::vector<Bytes>> messages;
    std::vector<std::string> awaited;

    bool step() {
        // The memory of what was aborted may be gone.
        for (Call &call : calls)
            if (call.comm->aborted) return true;
        if (!begun) {
            begun = true;
            for (Call &call : calls) {
                if (call.begin) call.begin();
                Comm &comm = *call.comm;
                for (auto &[to, bytes, size] : call.sends) {
                    uint64_t number = comm.sent[to]++;
                    send_bytes(comm, number, to, bytes, size);
                    if (call.until_received) awaited.push_back(file(comm, number, comm.rank, to));
                }
            }
            for (Call &call : calls) {
                incoming.emplace_back();
                messages.emplace_back(call.receives.size());
                for (auto &[from, size] : call.receives) incoming.back().push_back({call.comm->received[from]++, false});
            }
        }
        bool all = true;
        for (auto &path : awaited) all &= access(path.c_str(), F_OK) != 0;
        for (size_t c = 0; c < calls.size(); c++) {
            for (size_t i = 0; i < incoming[c].size(); i++) {
                auto &[from, size] = calls[c].receives[i];
                Incoming &it = incoming[c][i];
                if (!it.here) it.here = receive_bytes(*calls[c].comm, it.number, from, size, messages[c][i]);
                all &= it.here;
            }
        }
        if (all)
            for (size_t c = 0; c < calls.size(); c++) calls[c].end(messages[c]);
        return all;
    }
};

void put(void *stream, std::vector<Call> calls) {
    auto group = new Group;
    group->calls = std::move(calls);
    stand_in_put(
        stream,
        [](void *data) -> int {
            auto group = static_cast<Group *>(data);
            if (!group->step()) return 0;
            delete group;
            return 1;
        },
        group);
}

thread_local int depth;
thread_local std::vector<std::pair<void *, std::vector<Call>>> open_group;

int add(void *stream, Call call) {
    if (depth == 0) return put(stream, {std::move(call)}), SUCCESS;
    for (auto &[of, calls] : open_group)
        if (of == stream) return calls.push_back(std::move(call)), SUCCESS;
    open_group.push_back({stream, {}});
    open_group.back().second.push_back(std::move(call));
    return SUCCESS;
}


/// One number of each rank to one.
template <class T> T reduced(const std::vector<T> &from, int op) {
    T all{};
    for (size_t r = 0; r < from.size(); r++) {
        T value = from[r];
        if (r == 0) all = value;
        else if (op == PRODUCT) all = T(all * value);
        else if (op == MAX) all = all < value ? value : all;
        else if (op == MIN) all = value < all ? value : all;
        else all = T(all + value);
    }
    return op == AVERAGE ? T(all / T(from.size())) : all;
}

/// `T` is what is stored, `W` what is computed with, between which `wide` and `narrow` go.
template <class T, class W>
void reduce(const std::vector<const char *> &from, char *to, size_t count, int op, W (*wide)(T), T (*narrow)(W)) {
    T stored;
    std::vector<W> values(from.size());
    for (size_t i = 0; i < count; i++) {
        for (size_t r = 0; r < from.size(); r++) std::memcpy(&stored, from[r] + i * sizeof(T), sizeof(T)), values[r] = wide(stored);
        stored = narrow(reduced<W>(values, op));
        std::memcpy(to + i * sizeof(T), &stored, sizeof(T));
    }
}

template <class T> T same(T value) { return value; }

void reduce_any(const std::vector<const char *> &from, char *to, size_t count, int type, int op) {
    switch (type) {
    case I8: return reduce<int8_t, int8_t>(from, to, count, op, same, same);
    case U8: return reduce<uint8_t, uint8_t>(from, to, count, op, same, same);
    case I32: return reduce<int32_t, int32_t>(from, to, count, op, same, same);
    case U32: return reduce<uint32_t, uint32_t>(from, to, count, op, same, same);
    case I64: return reduce<int64_t, int64_t>(from, to, count, op, same, same);
    case U64: return reduce<uint64_t, uint64_t>(from, to, count, op, same, same);
    case F16: return reduce<uint16_t, float>(from, to, count, op, stand_in::F16::to, stand_in::F16::of);
    case F32: return reduce<float, float>(from, to, count, op, same, same);
    case F64: return reduce<double, double>(from, to, count, op, same, same);
    default: return reduce<uint16_t, float>(from, to, count, op, stand_in::Bf16::to, stand_in::Bf16::of);
    }
}

using Handle = std::shared_ptr<Comm> *;

/// A reduction whose result goes to `root`, or to all for -1.
int reduction(const void *send, void *receive, size_t count, int type, int op, int root, Handle handle, void *stream) {
    auto comm = *handle;
    if (type < 0 || type >= TYPES || root >= comm->ranks) return INVALID_ARGUMENT;
    auto factor = comm->factors.find(op);
    if (op >= OPS && factor == comm->factors.end()) return INVALID_ARGUMENT;
    size_t size = count * SIZES[type];
    auto mine = std::make_shared<Bytes>(size);
    Call call{comm, {}, false, {}, {}, [](std::vector<Bytes> &) {}};
    // A factor is each rank's own.
    std::array<char, 8> by{};
    if (op >= OPS) by = factor->second;
    call.begin = [=] {
        std::memcpy(mine->data(), send, size);
        if (op < OPS) return;
        for (size_t i = 0; i < count; i++) {
            char *at = mine->data() + i * SIZES[type];
            reduce_any({at, by.data()}, at, 1, type, PRODUCT);
        }
    };
    for (int r = 0; r < comm->ranks; r++)
        if (r != comm->rank && (root < 0 || root == r)) call.sends.push_back({r, mine->data(), size});
    if (root < 0 || root == comm->rank) {
        for (int r = 0; r < comm->ranks; r++)
            if (r != comm->rank) call.receives.push_back({r, size});
        call.end = [=](std::vector<Bytes> &messages) {
            std::vector<const char *> from;
            for (int r = 0, i = 0; r < comm->ranks; r++) from.push_back(r == comm->rank ? mine->data() : messages[i++].data());
            reduce_any(from, static_cast<char *>(receive), count, type, op >= OPS ? int(SUM) : op);
        };
    }
    return add(stream, std::move(call));
}

} // namespace

extern "C" {

int ncclGetVersion(int *version) { return *version = 22809, SUCCESS; }

int ncclGetUniqueId(Id *id) { return getrandom(id, sizeof *id, 0) == sizeof *id ? SUCCESS : SYSTEM_ERROR; }

int ncclCommInitRankConfig(Handle *comm, int ranks, Id id, int rank, void *) {
    if (ranks < 1 || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    auto made = std::make_shared<Comm>();
    for (int i = 0; i < 8; i++) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(id.bytes[i]));
        made->name += digits;
    }
    made->ranks = ranks, made->rank = rank;
    made->sent.resize(ranks), made->received.resize(ranks);
    return *comm = new std::shared_ptr<Comm>(made), SUCCESS;
}

int ncclCommGetAsyncError(Handle, int *error) { return *error = SUCCESS, SUCCESS; }
int ncclCommFinalize(Handle) { return SUCCESS; }
int ncclCommDestroy(Handle comm) { return delete comm, SUCCESS; }
int ncclCommAbort(Handle comm) {
    stand_in_between([](void *comm) { (*static_cast<Handle>(comm))->aborted = true; }, comm);
    return delete comm, SUCCESS;
}
const char *ncclGetErrorString(int code) { return code == SUCCESS ? "no error" : "an error of the stand-in"; }
const char *ncclGetLastError(void *) { return "an error of the stand-in"; }

int ncclGroupStart() { return depth++, SUCCESS; }

int ncclGroupEnd() {
    if (depth == 0) return INVALID_ARGUMENT;
    if (--depth > 0) return SUCCESS;
    auto group = std::move(open_group);
    open_group.clear();
    for (auto &[stream, calls] : group) put(stream, std::move(calls));
    return SUCCESS;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, Handle comm, void *stream) {
    return reduction(send, receive, count, type, op, -1, comm, stream);
}

int ncclReduce(const void *send, void *receive, size_t count, int type, int op, int root, Handle comm, void *stream) {
    return root < 0 ? INVALID_ARGUMENT : reduction(send, receive, count, type, op, root, comm, stream);
}

/// A reduction of each rank's piece, together.
int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, Handle handle, void *stream) {
    if (type < 0 || type >= TYPES) return INVALID_ARGUMENT;
    ncclGroupStart();
    int status = SUCCESS;
    for (int r = 0; r < (*handle)->ranks && status == SUCCESS; r++)
        status = reduction(static_cast<const char *>(send) + r * count * SIZES[type], receive, count, type, op, r, handle, stream);
    int ended = ncclGroupEnd();
    return status == SUCCESS ? ended : status;
}

int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, Handle handle, void *stream) {
    auto comm = *handle;
    if (type < 0 || type >= TYPES || root < 0 || root >= comm->ranks) return INVALID_ARGUMENT;
    size_t size = count * SIZES[type];
    Call call{comm, {}, false, {}, {}, {}};
    if (comm->rank == root) {
        for (int r = 0; r < comm->ranks; r++)
            if (r != root) call.sends.push_back({r, static_cast<const char *>(send), size});
        call.end = [=](std::vector<Bytes> &) { std::memmove(receive, send, size); };
    } else {
        call.receives.push_back({root, size});
        call.end = [=](std::vector<Bytes> &messages) { std::memcpy(receive, messages[0].data(), size); };
    }
    return add(stream, std::move(call));
}

int ncclAllGather(const void *send, void *receive, size_t count, int type, Handle handle, void *stream) {
    auto comm = *handle;
    if (type < 0 || type >= TYPES) return INVALID_ARGUMENT;
    size_t size = count * SIZES[type];
    Call call{comm, {}, false, {}, {}, {}};
    for (int r = 0; r < comm->ranks; r++)
        if (r != comm->rank) call.sends.push_back({r, static_cast<const char *>(send), size}), call.receives.push_back({r, size});
    call.end = [=](std::vector<Bytes> &messages) {
        auto to = static_cast<char *>(receive);
        std::memmove(to + comm->rank * size, send, size);
        for (int r = 0, i = 0; r < comm->ranks; r++)
            if (r != comm->rank) std::memcpy(to + r * size, messages[i++].data(), size);
    };
    return add(stream, std::move(call));
}

int ncclSend(const void *send, size_t count, int type, int peer, Handle handle, void *stream) {
    if (type < 0 || type >= TYPES || peer < 0 || peer >= (*handle)->ranks) return INVALID_ARGUMENT;
    Call call{*handle, {}, true, {{peer, static_cast<const char *>(send), count * SIZES[type]}}, {}, [](std::vector<Bytes> &) {}};
    return add(stream, std::move(call));
}

int ncclRecv(void *receive, size_t count, int type, int peer, Handle handle, void *stream) {
    if (type < 0 || type >= TYPES || peer < 0 || peer >= (*handle)->ranks) return INVALID_ARGUMENT;
    size_t size = count * SIZES[type];
    return add(stream, {*handle, {}, false, {}, {{peer, size}}, [=](std::vector<Bytes> &messages) { std::memcpy(receive, messages[0].data(), size); }});
}

/// A sum of what each rank has, times a factor.
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int, Handle comm) {
    static std::atomic<int> next{OPS};
    if (type < 0 || type >= TYPES) return INVALID_ARGUMENT;
    *op = next++;
    std::memcpy((*comm)->factors[*op].data(), scalar, SIZES[type]);
    return SUCCESS;
}

int ncclRedOpDestroy(int, Handle) { return SUCCESS; }

} // extern "C"
