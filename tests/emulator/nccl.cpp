// NCCL for ranks that are threads of one process on the emulated device: as much of it as hsdp calls. It keeps NCCL's manners where they
// matter to who calls it: communicators are made in the background and answer ncclInProgress; a collective occupies its stream until all
// ranks have come to it, and for ever if they never do; ranks that disagree hang; an abort lets go of this rank's own operations and
// of no other's; sums are made in the dtype of the elements, rounded at every addition.
//
//   HSDP_EMULATED_NCCL_FAILS_AFTER  of so many operations of a communicator, it reports an error of another rank
//   HSDP_EMULATED_NCCL_SPLIT     if it is set, communicators cannot be split
//   HSDP_EMULATED_NCCL_STUCK_FROM  from that operation of a communicator on, calls of groups stay in progress
//   HSDP_EMULATED_NCCL_VERSION   what ncclGetVersion says (default 23203)

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

void put_on_stream(void* stream, std::function<void()> operation);

namespace {

enum Status : int { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };

enum class Kind { AllGather, ReduceScatter, AllReduce, Broadcast };

// What a rank asks for.
struct Wanted {
    Kind kind;
    const void* from;
    void* to;
    std::size_t count;
    int dtype;
    int reduction;
    int root;

    auto must_agree() const { return std::make_tuple(kind, count, dtype, reduction, root); }
};

// The ranks at one collective of a communicator.
struct Meeting {
    std::vector<std::unique_ptr<Wanted>> wanted;
    std::size_t come = 0, gone = 0;
    bool is_done = false;
};

// What the ranks of a communicator share.
struct Shared {
    explicit Shared(int size) : size(size) {}

    int size;
    std::mutex lock;
    std::condition_variable changed;
    // Ranks that have joined.
    int joined = 0;
    std::map<std::uint64_t, Meeting> meetings;
    // By number of the split: what each rank has said, and the communicators of the colours.
    struct Split {
        std::map<int, std::pair<int, int>> said;
        std::map<int, std::shared_ptr<Shared>> of_colour;
    };
    std::map<std::uint64_t, Split> splits;
};

struct Comm {
    std::shared_ptr<Shared> shared;
    int rank = -1;
    std::atomic<int> state{IN_PROGRESS};
    std::atomic<bool> is_aborted{false};
    std::uint64_t issued = 0, split = 0;
    std::atomic<std::uint64_t> done{0};
};

// A handle keeps it alive as long as the stream does.
using Handle = std::shared_ptr<Comm>;

std::mutex lock;
std::map<std::string, std::shared_ptr<Shared>>& unique() {
    static auto* all = new std::map<std::string, std::shared_ptr<Shared>>;
    return *all;
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
std::vector<char> sum(const Meeting& meeting, std::size_t offset, std::size_t count, int dtype) {
    std::size_t size = bytes_of(dtype);
    std::vector<char> sum(count * size);
    for (std::size_t rank = 0; rank < meeting.wanted.size(); ++rank) {
        const char* from = (const char*)meeting.wanted[rank]->from + offset * size;
        if (rank == 0) std::memcpy(sum.data(), from, sum.size());
        else accumulate(sum.data(), from, count, dtype);
    }
    return sum;
}

// All are there: what each gets is made first and written then, since ranks may work in place.
void work(const Meeting& meeting) {
    const Wanted& first = *meeting.wanted[0];
    std::size_t bytes = first.count * bytes_of(first.dtype), ranks = meeting.wanted.size();
    std::vector<std::vector<char>> outputs;
    std::vector<char> all;
    switch (first.kind) {
        case Kind::AllGather:
            for (auto& wanted : meeting.wanted) all.insert(all.end(), (const char*)wanted->from, (const char*)wanted->from + bytes);
            outputs.assign(ranks, all);
            break;
        case Kind::ReduceScatter:
            for (std::size_t rank = 0; rank < ranks; ++rank) outputs.push_back(sum(meeting, rank * first.count, first.count, first.dtype));
            break;
        case Kind::AllReduce: outputs.assign(ranks, sum(meeting, 0, first.count, first.dtype)); break;
        case Kind::Broadcast: {
            const char* from = (const char*)meeting.wanted[first.root]->from;
            outputs.assign(ranks, std::vector<char>(from, from + bytes));
        }
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) std::memcpy(meeting.wanted[rank]->to, outputs[rank].data(), outputs[rank].size());
}

// Comes to a collective, and stays until it is done, or this rank's communicator is aborted.
void meet(const Handle& comm, std::uint64_t number, Wanted wanted) {
    Shared& shared = *comm->shared;
    std::unique_lock held(shared.lock);
    Meeting& meeting = shared.meetings[number];
    meeting.wanted.resize(shared.size);
    meeting.wanted[comm->rank] = std::make_unique<Wanted>(wanted);
    if (++meeting.come == std::size_t(shared.size)) {
        bool agree = true;
        for (auto& other : meeting.wanted) agree &= other->must_agree() == wanted.must_agree();
        if (agree) {
            work(meeting);
            meeting.is_done = true;
            shared.changed.notify_all();
        }
    }
    shared.changed.wait(held, [&] { return meeting.is_done || comm->is_aborted; });
    if (++meeting.gone == std::size_t(shared.size)) shared.meetings.erase(number);
    comm->done = number + 1;
    shared.changed.notify_all();
}

// The calls of a thread between a start and an end.
struct Group {
    int depth = 0;
    std::vector<std::pair<Handle, std::function<void()>>> calls;
};

thread_local Group group;

int issue(void* handle, Wanted wanted, void* stream) {
    if (!handle) return INVALID_ARGUMENT;
    Handle comm = *(Handle*)handle;
    if (comm->state != SUCCESS || comm->is_aborted) return INVALID_USAGE;
    if (bytes_of(wanted.dtype) == 0 || wanted.reduction != 0) return INVALID_ARGUMENT;
    auto call = [=] {
        std::uint64_t number = comm->issued++;
        put_on_stream(stream, [=] { meet(comm, number, wanted); });
    };
    if (group.depth > 0) {
        group.calls.emplace_back(comm, call);
        return IN_PROGRESS;
    }
    call();
    return SUCCESS;
}

// Joins the others in the background.
void join(Handle comm) {
    std::thread([comm] {
        Shared& shared = *comm->shared;
        std::unique_lock held(shared.lock);
        ++shared.joined;
        shared.changed.notify_all();
        shared.changed.wait(held, [&] { return shared.joined >= shared.size || comm->is_aborted; });
        if (!comm->is_aborted) comm->state = SUCCESS;
    }).detach();
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
    std::uint64_t number = next++;
    std::memcpy(id->internal, &number, sizeof number);
    return SUCCESS;
}

int ncclCommInitRankConfig(void** made, int size, Id id, int rank, void*) {
    if (rank < 0 || rank >= size) return INVALID_ARGUMENT;
    Handle comm = std::make_shared<Comm>();
    {
        std::lock_guard held(lock);
        auto& shared = unique()[std::string(id.internal, sizeof id.internal)];
        if (!shared) shared = std::make_shared<Shared>(size);
        comm->shared = shared;
    }
    comm->rank = rank;
    *made = new Handle(comm);
    join(comm);
    return IN_PROGRESS;
}

// The parent is in progress until the child is made; then its handle is written, by another thread than the caller's.
int ncclCommSplit(void* handle, int colour, int key, void** made, void*) {
    Handle parent = *(Handle*)handle;
    if (parent->state != SUCCESS || parent->is_aborted || std::getenv("HSDP_EMULATED_NCCL_SPLIT")) return INVALID_USAGE;
    parent->state = IN_PROGRESS;
    *made = nullptr;
    std::uint64_t number = parent->split++;
    std::thread([=] {
        Shared& shared = *parent->shared;
        std::unique_lock held(shared.lock);
        auto& split = shared.splits[number];
        split.said[parent->rank] = {colour, key};
        shared.changed.notify_all();
        shared.changed.wait(held, [&] { return split.said.size() == std::size_t(shared.size) || parent->is_aborted; });
        if (parent->is_aborted) return;
        if (colour >= 0) {
            Handle child = std::make_shared<Comm>();
            int size = 0, rank = 0;
            for (auto& [other, said] : split.said) {
                if (said.first != colour) continue;
                ++size;
                rank += std::make_pair(said.second, other) < std::make_pair(key, parent->rank);
            }
            auto& of_colour = split.of_colour[colour];
            if (!of_colour) of_colour = std::make_shared<Shared>(size);
            child->shared = of_colour;
            child->rank = rank;
            child->state = SUCCESS;
            __atomic_store_n(made, new Handle(child), __ATOMIC_RELEASE);
        }
        parent->state = SUCCESS;
    }).detach();
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(void* handle, int* state) {
    Handle comm = *(Handle*)handle;
    const char* fails_after = std::getenv("HSDP_EMULATED_NCCL_FAILS_AFTER");
    bool has_failed = fails_after && comm->issued >= std::strtoull(fails_after, nullptr, 10);
    *state = has_failed ? REMOTE_ERROR : comm->state.load();
    return SUCCESS;
}

// Waits for what was issued, in the background.
int ncclCommFinalize(void* handle) {
    Handle comm = *(Handle*)handle;
    comm->state = IN_PROGRESS;
    std::thread([comm] {
        Shared& shared = *comm->shared;
        std::unique_lock held(shared.lock);
        shared.changed.wait(held, [&] { return comm->done >= comm->issued || comm->is_aborted; });
        comm->state = SUCCESS;
    }).detach();
    return IN_PROGRESS;
}

int ncclCommDestroy(void* handle) {
    delete (Handle*)handle;
    return SUCCESS;
}

int ncclCommAbort(void* handle) {
    Handle comm = *(Handle*)handle;
    comm->is_aborted = true;
    if (comm->shared) {
        std::lock_guard held(comm->shared->lock);
        comm->shared->changed.notify_all();
    }
    delete (Handle*)handle;
    return SUCCESS;
}

int ncclCommCount(void* handle, int* count) {
    *count = (*(Handle*)handle)->shared->size;
    return SUCCESS;
}

int ncclCommUserRank(void* handle, int* rank) {
    *rank = (*(Handle*)handle)->rank;
    return SUCCESS;
}

int ncclCommCuDevice(void*, int* device) {
    *device = 0;
    return SUCCESS;
}

const char* ncclGetErrorString(int status) { return status == IN_PROGRESS ? "in progress" : "emulated"; }

const char* ncclGetLastError(void*) { return "the emulated NCCL says no more"; }

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
        if (stuck_from && comm->issued >= std::strtoull(stuck_from, nullptr, 10)) continue;
        std::thread([comm = comm, call = call] {
            std::this_thread::sleep_for(std::chrono::microseconds(200));
            call();
            if (!comm->is_aborted) comm->state = SUCCESS;
        }).detach();
    }
    return IN_PROGRESS;
}

int ncclAllGather(const void* from, void* to, std::size_t count, int dtype, void* comm, void* stream) {
    return issue(comm, {Kind::AllGather, from, to, count, dtype, 0, 0}, stream);
}

int ncclReduceScatter(const void* from, void* to, std::size_t count, int dtype, int reduction, void* comm, void* stream) {
    return issue(comm, {Kind::ReduceScatter, from, to, count, dtype, reduction, 0}, stream);
}

int ncclAllReduce(const void* from, void* to, std::size_t count, int dtype, int reduction, void* comm, void* stream) {
    return issue(comm, {Kind::AllReduce, from, to, count, dtype, reduction, 0}, stream);
}

int ncclBroadcast(const void* from, void* to, std::size_t count, int dtype, int root, void* comm, void* stream) {
    return issue(comm, {Kind::Broadcast, from, to, count, dtype, 0, root}, stream);
}

int ncclReduce(const void*, void*, std::size_t, int, int, int, void*, void*) { return INVALID_USAGE; }

int ncclSend(const void*, std::size_t, int, int, void*, void*) { return INVALID_USAGE; }

int ncclRecv(void*, std::size_t, int, int, void*, void*) { return INVALID_USAGE; }

}  // extern "C"
