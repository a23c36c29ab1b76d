// path -> bytes: one regular file mapped read-only and shared, its descriptor kept open. This
// file owns opening and its failures (Error(io)); it never looks at what the bytes mean.
#pragma once
#include <cstddef>
#include <string>

#include "gguf/lost_file.h"

namespace reflex::gguf {

class MappedFile {
 public:
  /// Maps a whole regular file. Directories, FIFOs, sockets and devices are refused without
  /// blocking. An empty file maps to no bytes (data() is nullptr). Throws Error(io).
  static MappedFile open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }  ///< bytes, as of open()
  int fd() const { return fd_; }

 private:
  MappedFile() = default;

  std::string path_;
  const std::byte* data_ = nullptr;  // (size_)
  size_t size_ = 0;
  WatchedMapping watched_;  // data_
  int fd_ = -1;
};

/// Bytes that the file behind fd has now: a mapping past them raises SIGBUS. Throws Error(io).
size_t file_size(int fd, const std::string& path);

}  // namespace reflex::gguf
