// Runs the native library on problems from standard input, for processors that only an emulator has here:
//
//     driver libundivided_cpu.so < problems > results
//
// A problem is a list of 8-byte numbers and of bytes: which call (0: level, 1: forward, 2: backward, 3: shared keys, 4:
// append); the number of memory blocks, and for each its size and content; the number of records, and for each its size
// and bytes, the number of its pointers, and for each its offset in the record, its block, and its offset in the block.
// A result is the status, the content of every block, and the numbers of the shared keys. emulated.py writes and reads
// them.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utility>
#include <vector>

namespace {

void read_bytes(void* to, size_t bytes) {
  if (bytes && fread(to, 1, bytes, stdin) != bytes) fprintf(stderr, "the problem ends early\n"), exit(1);
}
int64_t read_number() {
  int64_t number;
  read_bytes(&number, 8);
  return number;
}
void write_bytes(const void* from, size_t bytes) {
  if (bytes && fwrite(from, 1, bytes, stdout) != bytes) fprintf(stderr, "the result cannot be written\n"), exit(1);
}
void write_number(int64_t number) { write_bytes(&number, 8); }

void* find(void* library, const char* name) {
  void* function = dlsym(library, name);
  if (function == nullptr) fprintf(stderr, "%s\n", dlerror()), exit(1);
  return function;
}

}  // namespace

int main(int count, char** arguments) {
  void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  if (library == nullptr) return fprintf(stderr, "%s\n", count == 2 ? dlerror() : "usage: driver library"), 1;
  const auto forward = (int (*)(const void*))find(library, "undivided_forward");
  const auto backward = (int (*)(const void*, const void*))find(library, "undivided_backward");
  const auto shared_keys = (int64_t(*)(const void*, int64_t*, int64_t))find(library, "undivided_shared_keys");
  const auto append = (int (*)(const void*))find(library, "undivided_append");
  const auto level = (const char* (*)())find(library, "undivided_level");

  for (int64_t call; fread(&call, 8, 1, stdin) == 1; fflush(stdout)) {
    if (call == 0) {
      const char* name = level();
      write_number((int64_t)strlen(name)), write_bytes(name, strlen(name));
      continue;
    }
    // malloc aligns to 16 bytes, as few as the library may meet
    std::vector<std::pair<char*, size_t>> blocks((size_t)read_number());
    for (auto& [memory, bytes] : blocks) {
      bytes = (size_t)read_number(), memory = (char*)malloc(bytes + 1);
      if (memory == nullptr) return fprintf(stderr, "no memory\n"), 1;
      read_bytes(memory, bytes);
    }
    std::vector<std::vector<char>> records((size_t)read_number());
    for (auto& record : records) {
      record.resize((size_t)read_number());
      read_bytes(record.data(), record.size());
      for (int64_t pointers = read_number(); pointers > 0; pointers--) {
        const int64_t field = read_number(), block = read_number(), offset = read_number();
        const char* const address = blocks.at((size_t)block).first + offset;
        memcpy(record.data() + field, &address, 8);
      }
    }
    constexpr int64_t kParts = 16;
    int64_t found[3 * kParts] = {};
    const void* const record = records.empty() ? nullptr : records[0].data();
    write_number(call == 1   ? forward(record)
                 : call == 2 ? backward(record, records.at(1).data())
                 : call == 4 ? append(record)
                             : shared_keys(record, found, kParts));
    for (const auto& [memory, bytes] : blocks) write_bytes(memory, bytes), free(memory);
    if (call == 3) write_bytes(found, sizeof found);
  }
}
