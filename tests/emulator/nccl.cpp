// NCCL for ranks on emulated devices: as much of it as hsdp calls. It keeps NCCL's manners where they matter to who calls it:
// communicators are made in the background and answer ncclInProgress, but for a split, which answers ncclSuccess while it is in progress (NCCL
// 2.30); the first collective of a communicator stays in progress until all ranks have issued it, since they connect in it; a collective occupies
// its stream until all ranks have come to it, and for ever if they never do; ranks that disagree about the kind or the bytes of a collective
// hang, and nothing else is compared; an abort lets go of this rank's own operations and of no other's; each rank makes its sums in its own
// dtype of the elements, rounded at every addition; a communicator that is destroyed or aborted frees memory, and
// first waits for its calls that are in progress.
//
// It ends the process with a message where the real one may corrupt memory: if a communicator is used after it was
// destroyed or aborted, or by two threads at once, and if a stream is destroyed while a call on it is in progress.
//
//   HSDP_EMULATED_NCCL_FOLDER    where ranks meet that are processes, in files; without it they are threads of one process
//   HSDP_EMULATED_NCCL_FAILS_AFTER  of so many operations of a communicator, it reports an error of another rank
//   HSDP_EMULATED_NCCL_SPLIT     if it is set, communicators cannot be split
//   HSDP_EMULATED_NCCL_STUCK_FROM  from that operation of a communicator on, calls of groups stay in progress until an abort
//   HSDP_EMULATED_NCCL_VERSION   what ncclGetVersion says (default 23203)

#include "handles.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Status : int { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };

enum class Kind : std::int64_t { AllGather, ReduceScatter, AllReduce };

// What a rank asks for, and where its own elements lie.
struct Wanted {
    struct Asked {
        Kind kind;
        int dtype, reduction;
        std::size_t count;
    } asked;
    const void* from;
    void* to;
};

// Where ranks tell each other something, by name: each name is told once.
struct Board {
    virtual ~Board() = default;
    virtual void tell(const std::string& name, const std::string& said) = 0;
    virtual std::optional<std::string> heard(const std::string& name) = 0;
    virtual void forget(const std::string& name) = 0;
    // Until somebody may have told something.
    virtual void rest() = 0;
};

// Of the threads of this process.
class Memory : public Board {
  public:
    void tell(const std::string& name, const std::string& said) override {
        std::lock_guard held(lock);
        told[name] = said;
        changed.notify_all();
    }

    std::optional<std::string> heard(const std::string& name) override {
        std::lock_guard held(lock);
        auto found = told.find(name);
        return found == told.end() ? std::nullopt : std::optional(found->second);
    }

    void forget(const std::string& name) override {
        std::lock_guard held(lock);
        told.erase(name);
    }

    void rest() override {
        std::unique_lock held(lock);
        changed.wait_for(held, std::chrono::microseconds(500));
    }

  private:
    std::mutex lock;
    std::condition_variable changed;
    std::map<std::string, std::string> told;
};

// Of processes: a file for each name, which is there when it is whole.
class Folder : public Board {
  public:
    explicit Folder(const char* folder) : folder(folder) {}

    void tell(const std::string& name, const std::string& said) override {
        auto whole = folder / name, part = folder / (name + ".part");
        std::ofstream(part, std::ios::binary) << said;
        std::filesystem::rename(part, whole);
    }

    std::optional<std::string> heard(const std::string& name) override {
        std::ifstream file(folder / name, std::ios::binary);
        if (!file) return std::nullopt;
        return std::string(std::istreambuf_iterator<char>(file), {});
    }

    void forget(const std::string& name) override {
        std::error_code ignored;
        std::filesystem::remove(folder / name, ignored);
    }

    void rest() override { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

  private:
    std::filesystem::path folder;
};

Board& board() {
    static Board* board = [] () -> Board* {
        const char* folder = std::getenv("HSDP_EMULATED_NCCL_FOLDER");
        if (folder) return new Folder(folder);
        return new Memory;
    }();
    return *board;
}

struct Comm {
    // Its ranks', and nobody else's.
    std::string name;
    int size = 0, rank = -1;
    std::atomic<int> state{IN_PROGRESS};
    std::atomic<bool> is_aborted{false};
    // Held while memory of the caller is read or written, which an abort waits for.
    std::mutex copying;
    // Held by the thread that is in a call of this communicator.
    std::mutex using_it;
    std::uint64_t split = 0;
    // Operations that were issued, and that have ended.
    std::atomic<std::uint64_t> issued{0}, done{0};
    // Calls in progress in the background.
    std::atomic<int> jobs{0};

    std::string called(const std::string& what, std::uint64_t number, int rank) const {
        return name + "." + what + "." + std::to_string(number) + "." + std::to_string(rank);
    }

    // What all ranks tell, this one `said`; nothing if it is aborted meanwhile.
    std::vector<std::string> exchange(const std::string& what, std::uint64_t number, const std::string& said) {
        board().tell(called(what, number, rank), said);
        std::vector<std::string> all;
        while (int(all.size()) < size) {
            if (is_aborted) return {};
            if (auto heard = board().heard(called(what, number, int(all.size())))) all.push_back(*heard);
            else board().rest();
        }
        return all;
    }

    void await_jobs() {
        for (int left = jobs; left > 0; left = jobs) jobs.wait(left);
    }
};

// Keeps a communicator alive while a stream or a job uses it.
using Owner = std::shared_ptr<Comm>;

Handles<Comm>& comms() {
    static auto* comms = new Handles<Comm>("the communicator was destroyed or aborted, or never made");
    return *comms;
}

// A call of one thread on a communicator. Ends the process if another thread is in one.
class Call {
  public:
    explicit Call(Owner used, const char* call = __builtin_FUNCTION())
        : comm(std::move(used)), alone(comm->using_it, std::try_to_lock) {
        if (!alone) die(call, "another thread is in a call of this communicator");
    }

    Comm* operator->() const { return comm.get(); }

    const Owner comm;

  private:
    std::unique_lock<std::mutex> alone;
};

// Runs the rest of a call in the background. The job is dropped before it counts as done.
template <typename Job>
void in_background(const Owner& comm, Job job) {
    ++comm->jobs;
    std::thread([comm, job = std::optional(std::move(job))]() mutable {
        (*job)();
        job.reset();
        --comm->jobs;
        comm->jobs.notify_all();
    }).detach();
}

std::size_t bytes_of(int dtype) {
    switch (dtype) {
        case 0: case 1: return 1;           // int8, uint8
        case 2: case 3: return 4;           // int32, uint32
        case 4: case 5: return 8;           // int64, uint64
        case 6: case 9: return 2;           // float16, bfloat16
        case 7: return 4;                   // float32
        case 8: return 8;                   // float64
        default: return 0;
    }
}

float of_bf16(std::uint16_t bits) {
    std::uint32_t wide = std::uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return std::uint16_t((bits | 0x400000) >> 16);
    return std::uint16_t((bits + ((bits >> 16) & 1) + 0x7fff) >> 16);
}

template <typename T, typename Add>
void add(void* sum, const void* value, std::size_t count, Add both) {
    for (std::size_t index = 0; index < count; ++index) ((T*)sum)[index] = both(((T*)sum)[index], ((const T*)value)[index]);
}

// Adds `count` elements, in their own dtype.
void accumulate(void* sum, const void* value, std::size_t count, int dtype) {
    auto plus = [](auto one, auto other) { return one + other; };
    switch (dtype) {
        case 4: case 5: return add<std::uint64_t>(sum, value, count, plus);
        case 6: return add<_Float16>(sum, value, count, [](_Float16 one, _Float16 other) { return _Float16(one + other); });
        case 7: return add<float>(sum, value, count, plus);
        case 8: return add<double>(sum, value, count, plus);
        case 9:
            return add<std::uint16_t>(sum, value, count, [](std::uint16_t one, std::uint16_t other) {
                return to_bf16(of_bf16(one) + of_bf16(other));
            });
        default: return add<std::uint32_t>(sum, value, count, plus);
    }
}

// The sum of all ranks' `count` elements from `offset` on, in the order of ranks.
std::string sum(const std::vector<std::string>& brought, std::size_t offset, std::size_t count, int dtype) {
    std::size_t size = bytes_of(dtype);
    std::string sum = brought[0].substr(offset * size, count * size);
    for (std::size_t rank = 1; rank < brought.size(); ++rank) accumulate(sum.data(), brought[rank].data() + offset * size, count, dtype);
    return sum;
}

// What a rank gets of what all have brought.
std::string output(const Comm& comm, const Wanted::Asked& of, const std::vector<std::string>& brought) {
    switch (of.kind) {
        case Kind::AllGather: {
            std::string all;
            for (auto& part : brought) all += part;
            return all;
        }
        case Kind::ReduceScatter: return sum(brought, comm.rank * of.count, of.count, of.dtype);
        case Kind::AllReduce: return sum(brought, 0, of.count, of.dtype);
    }
    return {};
}

// What ranks must agree on: the kind, and the bytes of a rank. The real one compares nothing, and moves so many bytes.
bool agree(const Wanted::Asked& one, const std::string& brought) {
    Wanted::Asked other;
    std::memcpy(&other, brought.data(), sizeof other);
    return one.kind == other.kind && one.count * bytes_of(one.dtype) == other.count * bytes_of(other.dtype);
}

// Comes to a collective, and stays until it is done, or this rank's communicator is aborted.
void meet(const Owner& comm, std::uint64_t number, Wanted wanted) {
    const Wanted::Asked& of = wanted.asked;
    std::size_t parts = of.kind == Kind::ReduceScatter ? comm->size : 1;
    std::string own((const char*)&of, sizeof of);
    {
        std::lock_guard copying(comm->copying);
        if (comm->is_aborted) return;
        own.append((const char*)wanted.from, parts * of.count * bytes_of(of.dtype));
    }
    auto all = comm->exchange("meeting", number, own);
    for (auto& brought : all) {
        // Who disagrees hangs.
        while (!agree(of, brought) && !comm->is_aborted) board().rest();
        brought.erase(0, sizeof of);
    }
    if (!comm->is_aborted && !all.empty()) {
        std::string result = output(*comm, of, all);
        std::lock_guard copying(comm->copying);
        if (!comm->is_aborted) std::memcpy(wanted.to, result.data(), result.size());
    }
    // All have come to this one, and so have gone from the one before.
    if (number > 0 && !all.empty()) board().forget(comm->called("meeting", number - 1, comm->rank));
    comm->done = number + 1;
}

// The calls of a thread between a start and an end.
struct Group {
    int depth = 0;
    std::vector<std::pair<Owner, std::function<void()>>> calls;
};

thread_local Group group;

int issue(void* handle, Wanted wanted, void* stream, const char* name = __builtin_FUNCTION()) {
    if (!handle) return INVALID_ARGUMENT;
    Call used(comms().get(handle, name), name);
    Owner comm = used.comm;
    if (comm->state != SUCCESS || comm->is_aborted) return INVALID_USAGE;
    if (bytes_of(wanted.asked.dtype) == 0 || wanted.asked.reduction != 0) return INVALID_ARGUMENT;
    // A call of no elements is left out.
    if (wanted.asked.count == 0) return SUCCESS;
    auto call = [=, held = hold_stream(stream, name)] {
        std::uint64_t number = comm->issued++;
        put_on_stream(stream, [=] { meet(comm, number, wanted); }, name);
    };
    if (group.depth > 0) {
        group.calls.emplace_back(comm, call);
        return IN_PROGRESS;
    }
    call();
    return SUCCESS;
}

// Joins the others in the background.
void join(const Owner& comm) {
    in_background(comm, [comm] {
        if (!comm->exchange("join", 0, "").empty()) comm->state = SUCCESS;
    });
}

}  // namespace

extern "C" {

struct Id {
    char internal[128];
};

int ncclGetVersion(int* version) {
    const char* text = std::getenv("HSDP_EMULATED_NCCL_VERSION");
    *version = text ? std::atoi(text) : 23203;
    return SUCCESS;
}

int ncclGetUniqueId(Id* id) {
    static std::atomic<std::uint64_t> next{1};
    std::memset(id->internal, 0, sizeof id->internal);
    std::ostringstream name;
    name << "nccl-" << std::random_device{}() << "-" << next++;
    std::strncpy(id->internal, name.str().c_str(), sizeof id->internal - 1);
    return SUCCESS;
}

int ncclCommInitRankConfig(void** made, int size, Id id, int rank, void*) {
    if (rank < 0 || rank >= size) return INVALID_ARGUMENT;
    auto comm = std::make_shared<Comm>();
    comm->name = std::string(id.internal, strnlen(id.internal, sizeof id.internal));
    comm->size = size;
    comm->rank = rank;
    *made = comms().add(comm);
    join(comm);
    return IN_PROGRESS;
}

// The parent is in progress until the child is made; then its handle is written, by another thread than the caller's.
int ncclCommSplit(void* handle, int colour, int key, void** made, void*) {
    Call used(comms().get(handle));
    Owner parent = used.comm;
    if (parent->state != SUCCESS || parent->is_aborted || std::getenv("HSDP_EMULATED_NCCL_SPLIT")) return INVALID_USAGE;
    parent->state = IN_PROGRESS;
    *made = nullptr;
    std::uint64_t number = parent->split++;
    in_background(parent, [=] {
        auto all = parent->exchange("split", number, std::to_string(colour) + " " + std::to_string(key));
        if (all.empty()) return;
        if (colour >= 0) {
            auto child = std::make_shared<Comm>();
            child->name = parent->name + "-" + std::to_string(number) + "-" + std::to_string(colour);
            child->rank = 0;
            for (int other = 0; other < int(all.size()); ++other) {
                int its_colour = 0, its_key = 0;
                std::istringstream(all[other]) >> its_colour >> its_key;
                if (its_colour != colour) continue;
                ++child->size;
                child->rank += std::make_pair(its_key, other) < std::make_pair(key, parent->rank);
            }
            child->state = SUCCESS;
            __atomic_store_n(made, comms().add(child), __ATOMIC_RELEASE);
        }
        parent->state = SUCCESS;
    });
    return SUCCESS;
}

int ncclCommGetAsyncError(void* handle, int* state) {
    Call comm(comms().get(handle));
    const char* fails_after = std::getenv("HSDP_EMULATED_NCCL_FAILS_AFTER");
    bool has_failed = fails_after && comm->issued >= std::strtoull(fails_after, nullptr, 10);
    *state = has_failed ? REMOTE_ERROR : comm->state.load();
    return SUCCESS;
}

// Waits for what was issued, in the background.
int ncclCommFinalize(void* handle) {
    Call used(comms().get(handle));
    used->state = IN_PROGRESS;
    in_background(used.comm, [comm = used.comm] {
        while (comm->done < comm->issued && !comm->is_aborted) board().rest();
        note_free();
        comm->state = SUCCESS;
    });
    return IN_PROGRESS;
}

int ncclCommDestroy(void* handle) {
    Call comm(comms().take(handle));
    comm->await_jobs();
    note_free();
    return SUCCESS;
}

int ncclCommAbort(void* handle) {
    Call comm(comms().take(handle));
    comm->is_aborted = true;
    comm->await_jobs();
    // The caller frees the memory of calls next.
    { std::lock_guard copying(comm->copying); }
    note_free();
    return SUCCESS;
}

int ncclCommCount(void* handle, int* count) {
    *count = Call(comms().get(handle))->size;
    return SUCCESS;
}

int ncclCommUserRank(void* handle, int* rank) {
    *rank = Call(comms().get(handle))->rank;
    return SUCCESS;
}

const char* ncclGetErrorString(int status) { return status == IN_PROGRESS ? "in progress" : "emulated"; }

const char* ncclGetLastError(void* handle) {
    if (handle) Call(comms().get(handle));
    return "the emulated NCCL says no more";
}

// What is called in between is issued at the end: until then nothing of it is on a stream.
int ncclGroupStart() {
    ++group.depth;
    return SUCCESS;
}

int ncclGroupEnd() {
    if (group.depth == 0) return INVALID_USAGE;
    if (--group.depth > 0) return SUCCESS;
    // In the background, and in progress meanwhile.
    for (auto& [comm, call] : std::exchange(group.calls, {})) {
        comm->state = IN_PROGRESS;
        const char* stuck_from = std::getenv("HSDP_EMULATED_NCCL_STUCK_FROM");
        bool is_stuck = stuck_from && comm->issued >= std::strtoull(stuck_from, nullptr, 10);
        in_background(comm, [comm = comm, call = std::move(call), is_stuck]() mutable {
            std::this_thread::sleep_for(std::chrono::microseconds(200));
            while (is_stuck && !comm->is_aborted) board().rest();
            // The real one notices an abort late, too.
            if (is_stuck) std::this_thread::sleep_for(std::chrono::milliseconds(200));
            if (comm->issued == 0 && comm->exchange("connect", 0, "").empty()) return;
            call();
            // The caller may destroy the stream next.
            call = nullptr;
            if (!comm->is_aborted) comm->state = SUCCESS;
        });
    }
    return IN_PROGRESS;
}

int ncclAllGather(const void* from, void* to, std::size_t count, int dtype, void* comm, void* stream) {
    return issue(comm, {{Kind::AllGather, dtype, 0, count}, from, to}, stream);
}

int ncclReduceScatter(const void* from, void* to, std::size_t count, int dtype, int reduction, void* comm, void* stream) {
    return issue(comm, {{Kind::ReduceScatter, dtype, reduction, count}, from, to}, stream);
}

int ncclAllReduce(const void* from, void* to, std::size_t count, int dtype, int reduction, void* comm, void* stream) {
    return issue(comm, {{Kind::AllReduce, dtype, reduction, count}, from, to}, stream);
}

}  // extern "C"
