// NVIDIA's compiler of kernels by the C++ compiler of this machine: a kernel becomes a shared library of the folder that STAND_IN_KERNELS
// names, which the stand-in of the driver (comm-nccl/tests/gpu/driver.cpp) runs, and the text of its assembly is that library's path. A kernel that is in the
// folder already is not compiled again. STAND_IN_HEADER is the path of kernel.hpp.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

enum { SUCCESS = 0, COMPILATION = 6 };

struct Program {
    std::string source, path, log;
};

std::string variable(const char *name) {
    const char *value = std::getenv(name);
    if (!value) std::fprintf(stderr, "stand-in compiler: %s is not set\n", name), std::abort();
    return value;
}

// Not taken down when the process ends, while a thread may still compile.
const std::regex &KERNEL = *new std::regex("extern \"C\" __global__ void .*?([a-z][A-Za-z0-9_]*)\\((?!\\d+\\))");
const std::regex &SHARED = *new std::regex("extern __shared__ .*?char ([A-Za-z0-9_]+)\\[\\]");
/// The one instruction that the backend writes itself.
const std::regex &ATOMIC_ADD = *new std::regex(
    "asm volatile\\(\"atom\\.relaxed\\.add\\.f32 [^\"]*\" : \"=f\"\\((\\w+)\\) : \"l\"\\((\\w+)\\), \"f\"\\((\\w+)\\) *\\);");

/// What of a file a kernel depends on.
std::string contents(const std::string &path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// With the name of the kernel and of its shared memory made known to the driver.
std::string whole(const std::string &source) {
    std::smatch found;
    std::string text = "#include \"" + variable("STAND_IN_HEADER") + "\"\n", kernel, shared;
    std::istringstream lines(source);
    for (std::string line; std::getline(lines, line);) {
        if (line.rfind("#include", 0) == 0) continue;
        auto has = [&](const char *what) { return line.find(what) != std::string::npos; };
        if (has("__global__") && std::regex_search(line, found, KERNEL)) kernel = found[1];
        if (has("__shared__") && std::regex_search(line, found, SHARED)) shared = found[1];
        if (has("asm ")) line = std::regex_replace(line, ATOMIC_ADD, "$1 = stand_in::atomic_add($2, $3);");
        text += line + "\n";
    }
    if (kernel.empty()) return "#error \"no kernel\"\n";
    text += "alignas(1024) char stand_in_none[4096];\n";
    if (!shared.empty()) text += "alignas(1024) char " + shared + "[232448 + 4096];\n";
    std::string of = shared.empty() ? "stand_in_none" : shared;
    text += "extern \"C\" void *stand_in_copy(void **arguments) { return stand_in::Caller<decltype(&" + kernel + ")>::copy(arguments); }\n";
    text += "extern \"C\" void stand_in_run(void *arguments, const unsigned *grid, const unsigned *block, std::size_t shared, bool reverse) {\n";
    text += "    stand_in::run<&" + kernel + ">(arguments, grid, block, " + of + ", sizeof " + of + ", shared, reverse);\n}\n";
    return text;
}

const char *compiler() {
    const char *compiler = std::getenv("CXX");
    return compiler ? compiler : "c++";
}

const char *FLAGS[] = {"-std=c++17", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-fwrapv", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC"};

/// Runs the compiler; its exit status, and what it said.
int compile(const std::string &from, const std::string &to, std::string &log) {
    std::string said = to + ".log";
    std::vector<const char *> arguments = {compiler()};
    arguments.insert(arguments.end(), std::begin(FLAGS), std::end(FLAGS));
    for (const char *argument : {"-o", to.c_str(), from.c_str(), static_cast<const char *>(nullptr)}) arguments.push_back(argument);
    posix_spawn_file_actions_t streams;
    posix_spawn_file_actions_init(&streams);
    posix_spawn_file_actions_addopen(&streams, 2, said.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t child;
    int status = -1, spawned = posix_spawnp(&child, compiler(), &streams, nullptr, const_cast<char **>(arguments.data()), environ);
    posix_spawn_file_actions_destroy(&streams);
    if (spawned != 0 || waitpid(child, &status, 0) != child) return -1;
    std::ifstream file(said);
    log.assign(std::istreambuf_iterator<char>(file), {});
    unlink(said.c_str());
    return status;
}

} // namespace

extern "C" {

int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, SUCCESS; }
const char *nvrtcGetErrorString(int code) { return code == SUCCESS ? "no error" : "an error of the stand-in"; }

int nvrtcCreateProgram(void **program, const char *source, const char *, int, const char *const *, const char *const *) {
    return *program = new Program{source, "", ""}, SUCCESS;
}

int nvrtcDestroyProgram(void **program) {
    delete static_cast<Program *>(*program);
    return *program = nullptr, SUCCESS;
}

int nvrtcCompileProgram(void *program, int, const char *const *) {
    auto &it = *static_cast<Program *>(program);
    std::string text = whole(it.source);
    char name[32];
    std::string with = compiler();
    for (const char *flag : FLAGS) with += flag;
    std::string header = variable("STAND_IN_HEADER"), numbers = header.substr(0, header.rfind('/')) + "/../../../comm-nccl/tests/gpu/numbers.hpp";
    std::snprintf(name, sizeof name, "/%016zx", std::hash<std::string>()(with + text + contents(header) + contents(numbers)));
    std::string base = variable("STAND_IN_KERNELS") + name, mine = base + "." + std::to_string(getpid());
    it.path = base + ".so";
    // Of several ranks that need it at a time one compiles it. The lock goes with the process.
    int lock = open((base + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    struct Unlock {
        int file;
        ~Unlock() { close(file); }
    } unlock{lock};
    if (lock < 0 || flock(lock, LOCK_EX) != 0) return std::perror(base.c_str()), COMPILATION;
    if (access(it.path.c_str(), R_OK) == 0) return SUCCESS;
    std::ofstream(mine + ".cpp") << text;
    bool well = compile(mine + ".cpp", mine + ".so", it.log) == 0 && std::rename((mine + ".so").c_str(), it.path.c_str()) == 0;
    std::rename((mine + ".cpp").c_str(), (base + ".cpp").c_str());
    if (!well) std::fprintf(stderr, "stand-in compiler: %s.cpp\n%s\n", base.c_str(), it.log.c_str());
    return well ? SUCCESS : COMPILATION;
}

int nvrtcGetPTXSize(void *program, size_t *bytes) { return *bytes = static_cast<Program *>(program)->path.size() + 1, SUCCESS; }
int nvrtcGetPTX(void *program, char *text) { return std::strcpy(text, static_cast<Program *>(program)->path.c_str()), SUCCESS; }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { return *bytes = static_cast<Program *>(program)->log.size() + 1, SUCCESS; }
int nvrtcGetProgramLog(void *program, char *text) { return std::strcpy(text, static_cast<Program *>(program)->log.c_str()), SUCCESS; }

} // extern "C"
