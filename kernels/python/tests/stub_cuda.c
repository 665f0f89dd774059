/* The driver's functions that semmoe_kernels/driver.py calls, over files that other processes map. As the driver, it does not map a
 * process's own memory a second time, and wants a context for all that touches memory. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST 64
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201 };

typedef struct {
  char reserved[64];
} Handle;

static struct {
  char path[56];
  uint64_t at;
  size_t size;
} made[MOST];
static int serial, depth;
static __thread int bound;

/* Files are in STUB_CUDA_FOLDER. */
static const char *in_folder(const char *name) {
  static __thread char path[512];
  snprintf(path, sizeof path, "%s/%s", getenv("STUB_CUDA_FOLDER"), name);
  return path;
}

static int map(const char *path, size_t size, uint64_t *at) {
  int file = open(in_folder(path), O_RDWR);
  void *memory = file < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  *at = (uint64_t)(uintptr_t)memory;
  return memory == MAP_FAILED ? INVALID_VALUE : OK;
}

int cuInit(unsigned flags) { return flags == 0 ? OK : INVALID_VALUE; }
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? OK : INVALID_VALUE; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &depth, device == 0 ? OK : INVALID_VALUE; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device == 0 ? OK : INVALID_VALUE; }
int cuCtxPushCurrent_v2(void *context) { return ++bound, context == &depth ? OK : INVALID_VALUE; }
int cuCtxPopCurrent_v2(void **context) { return *context = &depth, bound-- > 0 ? OK : NO_CONTEXT; }
int cuCtxSynchronize(void) { return bound > 0 ? OK : NO_CONTEXT; }

int cuMemAlloc_v2(uint64_t *at, size_t size) {
  if (bound == 0) return NO_CONTEXT;
  if (size > (size_t)1 << 30 || serial == MOST) return OUT_OF_MEMORY;
  snprintf(made[serial].path, sizeof made[serial].path, "%d-%d", (int)getpid(), serial);
  int file = open(in_folder(made[serial].path), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0 || ftruncate(file, (off_t)size) != 0) return OUT_OF_MEMORY;
  close(file);
  int status = map(made[serial].path, size, at);
  /* As the driver's, fresh memory holds anything. */
  if (status == OK) memset((void *)(uintptr_t)*at, 0xff, size);
  made[serial].at = *at;
  made[serial++].size = size;
  return status;
}

int cuMemFree_v2(uint64_t at) {
  if (bound == 0) return NO_CONTEXT;
  for (int i = 0; i < serial; i++) {
    if (made[i].at != at) continue;
    made[i].at = 0;
    munmap((void *)(uintptr_t)at, made[i].size);
    return unlink(in_folder(made[i].path)) == 0 ? OK : INVALID_VALUE;
  }
  return INVALID_VALUE;
}

int cuMemsetD8_v2(uint64_t at, unsigned char byte, size_t size) {
  return bound == 0 ? NO_CONTEXT : (memset((void *)(uintptr_t)at, byte, size), OK);
}

int cuIpcGetMemHandle(Handle *handle, uint64_t at) {
  if (bound == 0) return NO_CONTEXT;
  for (int i = 0; i < serial; i++) {
    if (made[i].at != at) continue;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, made[i].path, sizeof made[i].path);
    return OK;
  }
  return INVALID_VALUE;
}

int cuIpcOpenMemHandle_v2(uint64_t *at, Handle handle, unsigned flags) {
  if (bound == 0) return NO_CONTEXT;
  struct stat found;
  handle.reserved[63] = 0;
  if (flags != 1 || atoi(handle.reserved) == (int)getpid() || stat(in_folder(handle.reserved), &found) != 0) return INVALID_VALUE;
  return map(handle.reserved, (size_t)found.st_size, at);
}

int cuIpcCloseMemHandle(uint64_t at) { return bound > 0 && at != 0 ? OK : INVALID_VALUE; }
int cuGetErrorString(int status, const char **text) { return *text = status == NO_CONTEXT ? "stub: no context" : "stub", OK; }
