// A CUDA driver for hosts without a GPU: as much of it as hsdp calls. Streams are threads, device memory is memory of the host, and the
// kernels are those of kernels/cuda, made by the host's compiler. It is built to find mistakes in how operations are ordered:
// streams run at once and are late at random, memory that means nothing is full of NaN, memory that is freed is gone, and a
// call on a stream or an event that was destroyed ends the process with a message.
//
//   HSDP_EMULATED_DELAY_US   how late an operation may begin, at the most (default 50)
//   HSDP_EMULATED_FENCES     if it is set, no operation that is issued after memory was freed begins before all that were issued before have ended
//   HSDP_EMULATED_MEMORY     bytes that the device has (default 2 GiB)

#include "handles.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

std::function<void()> emulate(const char* name, unsigned grid, unsigned block, void** arguments);

namespace {

enum Status : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
};

std::size_t setting(const char* name, std::size_t otherwise) {
    const char* text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// The operations of all streams, in the order in which they were issued.
class Order {
  public:
    struct Place {
        std::uint64_t number, fence;
    };

    Place issue() {
        std::lock_guard held(lock);
        unfinished.insert(++last);
        return {last, fence};
    }

    // What is issued from now on begins when all before has ended.
    void divide() {
        std::lock_guard held(lock);
        if (std::getenv("HSDP_EMULATED_FENCES")) fence = last;
    }

    void begin(Place place) {
        std::unique_lock held(lock);
        changed.wait(held, [&] { return *unfinished.begin() > place.fence; });
    }

    void end(Place place) {
        std::lock_guard held(lock);
        unfinished.erase(place.number);
        changed.notify_all();
    }

  private:
    std::mutex lock;
    std::condition_variable changed;
    std::set<std::uint64_t> unfinished;
    std::uint64_t last = 0, fence = 0;
};

Order& order() {
    static Order* order = new Order;
    return *order;
}

// An order of operations, which a thread runs one after the other.
class Stream {
  public:
    Stream() : thread([this] { run(); }) {}

    // Refuses operations from now on, and waits until all before have run.
    void end() {
        {
            std::lock_guard held(lock);
            push([this] { is_over = true; });
            is_ended = true;
        }
        thread.join();
    }

    void put(std::function<void()> operation) {
        std::lock_guard held(lock);
        if (is_ended) die("stream", "an operation was issued while another thread destroyed the stream");
        push(std::move(operation));
    }

    void drain() {
        std::unique_lock held(lock);
        changed.wait(held, [this] { return operations.empty() && !is_busy; });
    }

    // Calls of libraries that are in progress, and may still issue operations here.
    std::atomic<int> holders{0};

  private:
    void push(std::function<void()> operation) {
        operations.push_back([place = order().issue(), operation = std::move(operation)] {
            order().begin(place);
            operation();
            order().end(place);
        });
        changed.notify_all();
    }

    void run() {
        std::minstd_rand random(std::random_device{}());
        auto most = setting("HSDP_EMULATED_DELAY_US", 50);
        while (!is_over) {
            std::unique_lock held(lock);
            changed.wait(held, [this] { return !operations.empty(); });
            auto operation = std::move(operations.front());
            operations.pop_front();
            is_busy = true;
            held.unlock();
            if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % (most + 1)));
            operation();
            operation = nullptr;
            held.lock();
            is_busy = false;
            changed.notify_all();
        }
    }

    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> operations;
    bool is_busy = false, is_ended = false, is_over = false;
    std::thread thread;
};

// A point of a stream, to which it comes once.
struct Point {
    std::mutex lock;
    std::condition_variable changed;
    bool has_come = false;

    void come() {
        std::lock_guard held(lock);
        has_come = true;
        changed.notify_all();
    }

    void wait() {
        std::unique_lock held(lock);
        changed.wait(held, [this] { return has_come; });
    }
};

// The point that was recorded last, if any was. Who waits for an event waits for the point of that time, though another be recorded
// meanwhile, on a stream that comes there sooner.
struct Event {
    std::mutex lock;
    std::shared_ptr<Point> last;
};

std::shared_ptr<Point> last_of(Event& event) {
    std::lock_guard held(event.lock);
    return event.last;
}

struct Device {
    std::mutex lock;
    // Streams that run, also those that were destroyed before their last operation.
    std::set<std::shared_ptr<Stream>> streams;
    // By address: the bytes of each allocation.
    std::map<char*, std::size_t> memory;
    std::size_t used = 0;
};

Device& device() {
    // Streams may outlive the end of `main`.
    static Device* device = new Device;
    return *device;
}

Handles<Stream>& streams() {
    static auto* streams = new Handles<Stream>("the stream was destroyed, or never made");
    return *streams;
}

Handles<Event>& events() {
    static auto* events = new Handles<Event>("the event was destroyed, or never made");
    return *events;
}

// The one context. A thread must have made it current before it calls anything else.
thread_local void* current = nullptr;
void* context() { return &device(); }

#define NEEDS_CONTEXT \
    if (current != context()) return INVALID_CONTEXT

}  // namespace

void put_on_stream(void* stream, std::function<void()> operation, const char* call) {
    streams().get(stream, call)->put(std::move(operation));
}

std::shared_ptr<void> hold_stream(void* stream, const char* call) {
    auto held = streams().get(stream, call);
    ++held->holders;
    return std::shared_ptr<void>(held.get(), [held](void*) { --held->holders; });
}

void note_free() { order().divide(); }

extern "C" {

int cuInit(unsigned) { return SUCCESS; }

int cuDeviceGetCount(int* count) {
    *count = 1;
    return SUCCESS;
}

int cuDeviceGet(int* found, int ordinal) {
    *found = 0;
    return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 16: *value = 2; return SUCCESS;  // multiprocessors
        case 75: *value = 9; return SUCCESS;  // compute capability, major
        case 76: *value = 0; return SUCCESS;  // minor
        default: return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void** retained, int) {
    *retained = context();
    return SUCCESS;
}

int cuCtxGetCurrent(void** found) {
    *found = current;
    return SUCCESS;
}

int cuCtxSetCurrent(void* made) {
    current = made;
    return SUCCESS;
}

int cuStreamCreate(void** made, unsigned) {
    NEEDS_CONTEXT;
    auto stream = std::make_shared<Stream>();
    std::lock_guard held(device().lock);
    device().streams.insert(stream);
    *made = streams().add(stream);
    return SUCCESS;
}

int cuStreamDestroy_v2(void* destroyed) {
    NEEDS_CONTEXT;
    auto stream = streams().take(destroyed);
    if (stream->holders > 0) die(__func__, "a call of a library on this stream is still in progress");
    // Operations that were issued still run, and a thread that frees memory waits for them.
    std::thread([stream] {
        stream->end();
        std::lock_guard held(device().lock);
        device().streams.erase(stream);
    }).detach();
    return SUCCESS;
}

int cuEventCreate(void** made, unsigned) {
    NEEDS_CONTEXT;
    *made = events().add(std::make_shared<Event>());
    return SUCCESS;
}

int cuEventDestroy_v2(void* event) {
    events().take(event);
    return SUCCESS;
}

int cuEventRecord(void* recorded, void* stream) {
    NEEDS_CONTEXT;
    auto point = std::make_shared<Point>();
    {
        auto event = events().get(recorded);
        std::lock_guard held(event->lock);
        event->last = point;
    }
    streams().get(stream)->put([point] { point->come(); });
    return SUCCESS;
}

int cuStreamWaitEvent(void* stream, void* awaited, unsigned) {
    NEEDS_CONTEXT;
    if (auto point = last_of(*events().get(awaited))) streams().get(stream)->put([point] { point->wait(); });
    return SUCCESS;
}

int cuEventQuery(void* queried) {
    NEEDS_CONTEXT;
    auto point = last_of(*events().get(queried));
    if (!point) return SUCCESS;
    std::lock_guard held(point->lock);
    return point->has_come ? SUCCESS : NOT_READY;
}

int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
    NEEDS_CONTEXT;
    std::lock_guard held(device().lock);
    if (device().used + bytes > setting("HSDP_EMULATED_MEMORY", std::size_t(2) << 30)) return OUT_OF_MEMORY;
    auto* memory = (char*)std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    std::memset(memory, 0xff, bytes);
    device().memory[memory] = bytes;
    device().used += bytes;
    *address = (std::uint64_t)memory;
    return SUCCESS;
}

int cuMemFree_v2(std::uint64_t address) {
    NEEDS_CONTEXT;
    std::lock_guard held(device().lock);
    auto found = device().memory.find((char*)address);
    if (found == device().memory.end()) return INVALID_VALUE;
    note_free();
    for (auto& stream : device().streams) stream->drain();
    std::memset(found->first, 0xff, found->second);
    device().used -= found->second;
    std::free(found->first);
    device().memory.erase(found);
    return SUCCESS;
}

int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    NEEDS_CONTEXT;
    std::lock_guard held(device().lock);
    *total = setting("HSDP_EMULATED_MEMORY", std::size_t(2) << 30);
    *free = *total - device().used;
    return SUCCESS;
}

int cuMemHostAlloc(void** made, std::size_t bytes, unsigned) {
    NEEDS_CONTEXT;
    *made = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    return SUCCESS;
}

int cuMemFreeHost(void* memory) {
    std::free(memory);
    return SUCCESS;
}

int cuMemsetD8Async(std::uint64_t address, unsigned char byte, std::size_t bytes, void* stream) {
    NEEDS_CONTEXT;
    streams().get(stream)->put([=] { std::memset((void*)address, byte, bytes); });
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void* from, std::size_t bytes, void* stream) {
    NEEDS_CONTEXT;
    streams().get(stream)->put([=] { std::memcpy((void*)to, from, bytes); });
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes, void* stream) {
    NEEDS_CONTEXT;
    streams().get(stream)->put([=] { std::memcpy((void*)to, (const void*)from, bytes); });
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t bytes, void* stream) {
    NEEDS_CONTEXT;
    streams().get(stream)->put([=] { std::memcpy(to, (const void*)from, bytes); });
    return SUCCESS;
}

int cuModuleLoadData(void** module, const void*) {
    NEEDS_CONTEXT;
    *module = context();
    return SUCCESS;
}

int cuModuleGetFunction(void** function, void*, const char* name) {
    NEEDS_CONTEXT;
    if (!emulate(name, 0, 0, nullptr)) return NOT_FOUND;
    *function = strdup(name);
    return SUCCESS;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, std::size_t) {
    *blocks = 3;
    return SUCCESS;
}

int cuLaunchKernel(void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
    NEEDS_CONTEXT;
    if (grid == 0 || block == 0 || block > 1024) return INVALID_VALUE;
    streams().get(stream)->put(emulate((const char*)function, grid, block, arguments));
    return SUCCESS;
}

int cuGetErrorName(int status, const char** name) {
    *name = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_EMULATED";
    return SUCCESS;
}

int cuGetErrorString(int, const char** text) {
    *text = "the emulated driver refuses it";
    return SUCCESS;
}

// NVRTC: the kernels are there already.

int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
    *program = context();
    return SUCCESS;
}

int nvrtcCompileProgram(void*, int, const char* const*) { return SUCCESS; }

static const char PTX[] = "// emulated\n";

int nvrtcGetPTXSize(void*, std::size_t* size) {
    *size = sizeof PTX;
    return SUCCESS;
}

int nvrtcGetPTX(void*, char* ptx) {
    std::memcpy(ptx, PTX, sizeof PTX);
    return SUCCESS;
}

int nvrtcGetProgramLogSize(void*, std::size_t* size) {
    *size = 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(void*, char* log) {
    *log = 0;
    return SUCCESS;
}

int nvrtcDestroyProgram(void**) { return SUCCESS; }

}  // extern "C"
