// open, fstat, mmap; see mapped_file.h.
#include "gguf/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace reflex::gguf {

namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  return "no regular file";
}

int open_fd(const std::string& path) {
  // An embedded NUL would silently open another, shorter path.
  if (path.find('\0') != std::string::npos) fail(ErrorKind::io, "cannot open a path with a NUL byte in it");
  int fd;
  do {
    // O_NONBLOCK: opening a FIFO that nobody writes to must not hang before fstat can refuse it.
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail(ErrorKind::io, "cannot open %s: %s", path.c_str(), std::strerror(errno));
  return fd;
}

}  // namespace

MappedFile MappedFile::open(const std::string& path) {
  MappedFile file;
  file.path_ = path;
  file.fd_ = open_fd(path);
  struct stat st {};
  if (::fstat(file.fd_, &st) != 0)
    fail(ErrorKind::io, "cannot stat %s: %s", path.c_str(), std::strerror(errno));
  if (!S_ISREG(st.st_mode))
    fail(ErrorKind::io, "cannot open %s: expected a regular file, found %s", path.c_str(),
         kind_of(st.st_mode));
  // Loaders read through this descriptor; io_uring would take O_NONBLOCK for "fail, don't wait".
  ::fcntl(file.fd_, F_SETFL, 0);
  file.size_ = static_cast<size_t>(st.st_size);
  if (file.size_ == 0) return file;
  // Shared: the pages are the page cache's own, and a GPU driver can register them read-only.
  void* p = ::mmap(nullptr, file.size_, PROT_READ, MAP_SHARED, file.fd_, 0);
  if (p == MAP_FAILED) {
    const int err = errno;
    file.size_ = 0;
    fail(err == ENOMEM ? ErrorKind::out_of_memory : ErrorKind::io, "cannot map %s (%lld bytes): %s",
         path.c_str(), static_cast<long long>(st.st_size), std::strerror(err));
  }
  file.data_ = static_cast<const std::byte*>(p);
  file.watched_ = WatchedMapping(p, file.size_, path);
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      watched_(std::move(other.watched_)),
      fd_(std::exchange(other.fd_, -1)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(watched_, other.watched_);
  std::swap(fd_, other.fd_);
  return *this;
}

MappedFile::~MappedFile() {
  watched_ = {};  // what is mapped there next is none of ours
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
  if (fd_ >= 0) ::close(fd_);
}

size_t file_size(int fd, const std::string& path) {
  struct stat st {};
  if (::fstat(fd, &st) != 0) fail(ErrorKind::io, "cannot stat %s: %s", path.c_str(), std::strerror(errno));
  return static_cast<size_t>(st.st_size);
}

}  // namespace reflex::gguf
