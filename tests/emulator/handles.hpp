// Handles of the emulated libraries, and the calls between their files.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

// Ends the process with a message, for a mistake that the real library need not notice.
[[noreturn]] inline void die(const char* call, const char* problem) {
    std::fprintf(stderr, "emulated %s: %s\n", call, problem);
    std::abort();
}

// Objects by their handles. A handle is a number, not an address, and is never used twice. So a
// call with a handle that was destroyed ends the process, and reads no freed memory.
template <typename Object>
class Handles {
  public:
    explicit Handles(const char* gone) : gone(gone) {}

    void* add(std::shared_ptr<Object> object) {
        std::lock_guard held(lock);
        // CUDA gives a meaning to the streams 0, 1 and 2.
        void* handle = (void*)(16 * ++made);
        objects.emplace(handle, std::move(object));
        return handle;
    }

    // Returns the object of a handle. `call` is the function that asks, for the message.
    std::shared_ptr<Object> get(void* handle, const char* call = __builtin_FUNCTION()) {
        std::lock_guard held(lock);
        return find(handle, call)->second;
    }

    // Returns the object of a handle, which is not valid from now on.
    std::shared_ptr<Object> take(void* handle, const char* call = __builtin_FUNCTION()) {
        std::lock_guard held(lock);
        auto found = find(handle, call);
        auto object = std::move(found->second);
        objects.erase(found);
        return object;
    }

  private:
    auto find(void* handle, const char* call) {
        auto found = objects.find(handle);
        if (found == objects.end()) die(call, gone);
        return found;
    }

    const char* gone;
    std::mutex lock;
    std::uintptr_t made = 0;
    std::map<void*, std::shared_ptr<Object>> objects;
};

// Issues an operation of cuBLAS or NCCL. Ends the process if the stream was destroyed.
void put_on_stream(void* stream, std::function<void()> operation, const char* call = __builtin_FUNCTION());

// Marks a stream as used by a call in progress until the returned value is dropped. Until then, its
// destruction ends the process.
std::shared_ptr<void> hold_stream(void* stream, const char* call);

// Notes that memory was freed.
void note_free();
