// Implements the access history of memory as a map of non-overlapping address ranges.

#include "access_history.h"

namespace backplane::sim::driver {
namespace {

bool unordered(const Access& earlier, uint32_t stream, const Clock& known) {
  return earlier.position != 0 && earlier.stream != stream && earlier.position > known.of(earlier.stream);
}

}  // namespace

// Returns the first piece that ends after the address.
AccessHistory::Pieces::const_iterator AccessHistory::first_after(uintptr_t address) const {
  auto piece = pieces_.upper_bound(address);
  if (piece != pieces_.begin() && std::prev(piece)->second.end > address) --piece;
  return piece;
}

Conflict AccessHistory::conflict(uintptr_t first, uint64_t bytes, bool writes, uint32_t stream,
                                 const Clock& known) const {
  const uintptr_t end = first + bytes;
  for (auto piece = first_after(first); piece != pieces_.end() && piece->first < end; ++piece) {
    const auto found = [&](const Access& earlier, bool earlier_writes) {
      return Conflict{earlier, earlier_writes, std::max(first, piece->first), std::min(end, piece->second.end)};
    };
    if (unordered(piece->second.write, stream, known)) return found(piece->second.write, true);
    if (!writes) continue;
    for (const Access& read : piece->second.reads)
      if (unordered(read, stream, known)) return found(read, false);
  }
  return {};
}

// Splits a piece, so that none crosses the address.
void AccessHistory::cut(uintptr_t at) {
  const auto after = pieces_.lower_bound(at);
  if (after == pieces_.begin()) return;
  Piece& piece = std::prev(after)->second;
  if (piece.end <= at) return;
  Piece rest = piece;
  piece.end = at;
  pieces_.emplace(at, std::move(rest));
}

void AccessHistory::add_read(Piece& piece, const Access& access) {
  for (Access& read : piece.reads)
    if (read.stream == access.stream) {
      read = access;
      return;
    }
  piece.reads.push_back(access);
}

void AccessHistory::add(uintptr_t first, uint64_t bytes, bool writes, const Access& access) {
  if (bytes == 0) return;
  const uintptr_t end = first + bytes;
  cut(first);
  cut(end);
  if (writes) {
    pieces_.erase(pieces_.lower_bound(first), pieces_.lower_bound(end));
    pieces_[first] = Piece{end, access, {}};
    return;
  }
  // Fills the gaps between existing pieces too.
  for (uintptr_t at = first; at < end;) {
    auto piece = pieces_.lower_bound(at);
    if (piece == pieces_.end() || piece->first != at) {
      const uintptr_t until = piece == pieces_.end() ? end : std::min(end, piece->first);
      piece = pieces_.emplace(at, Piece{until, {}, {}}).first;
    }
    add_read(piece->second, access);
    at = piece->second.end;
  }
}

void AccessHistory::free(uintptr_t first, uint64_t bytes, const std::vector<uint32_t>& streams, const Clock& known) {
  const uintptr_t end = first + bytes;
  cut(first);
  cut(end);
  const auto ordered = [&](const Access& access) {
    return access.position <= known.of(access.stream) ||
           std::find(streams.begin(), streams.end(), access.stream) != streams.end();
  };
  for (auto piece = pieces_.lower_bound(first); piece != pieces_.end() && piece->first < end;) {
    Access& write = piece->second.write;
    auto& reads = piece->second.reads;
    if (ordered(write)) write = {};
    reads.erase(std::remove_if(reads.begin(), reads.end(), ordered), reads.end());
    write.freed = true;
    for (Access& read : reads) read.freed = true;
    piece = write.position == 0 && reads.empty() ? pieces_.erase(piece) : std::next(piece);
  }
}

void AccessHistory::forget(uintptr_t first, uint64_t bytes) {
  cut(first);
  cut(first + bytes);
  pieces_.erase(pieces_.lower_bound(first), pieces_.lower_bound(first + bytes));
}

}  // namespace backplane::sim::driver
