// Implements the SIGSEGV/SIGBUS handler that explains stray accesses to a card's memory and to pinned memory in use.

#include "access_fault.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "process.h"

namespace backplane::sim::driver {
namespace {

std::atomic<Driver*> watched{nullptr};

// The handler that was installed before ours, per signal; ours is installed once and remembers it.
struct Before {
  int signal;
  struct sigaction action;
  std::atomic<bool> known;
  // Set if the other handler was installed after ours and calls ours as its predecessor: it will pass the signal back.
  std::atomic<bool> circular;
  std::atomic<bool> entered;
};
Before before[] = {{SIGSEGV, {}, {false}, {false}, {false}}, {SIGBUS, {}, {false}, {false}, {false}}};

Before* before_of(int signal) {
  for (Before& each : before)
    if (each.signal == signal) return &each;
  return nullptr;
}

// Builds a text without malloc, locale or stdio, which a signal handler must not use.
class Message {
 public:
  Message& operator<<(const char* text) {
    while (*text && used_ < sizeof text_) text_[used_++] = *text++;
    return *this;
  }
  Message& operator<<(uint64_t number) { return digits(number, 10); }
  Message& hex(uint64_t number) { return (*this << "0x").digits(number, 16); }
  std::string text() const { return std::string(text_, used_); }
  void send() const {
    for (size_t sent = 0; sent < used_;) {
      const ssize_t wrote = write(STDERR_FILENO, text_ + sent, used_ - sent);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return;
      sent += static_cast<size_t>(wrote);
    }
  }

 private:
  Message& digits(uint64_t number, unsigned base) {
    char reversed[24];
    size_t count = 0;
    do {
      reversed[count++] = "0123456789abcdef"[number % base];
      number /= base;
    } while (number);
    while (count && used_ < sizeof text_) text_[used_++] = reversed[--count];
    return *this;
  }
  char text_[1024];
  size_t used_ = 0;
};

void describe_address(Message& message, Card& card, uintptr_t address) {
  const Block* const block = card.allocator().table().find_without_lock(address);
  const Segment* const segment = card.allocator().table().segment_at(address);
  if (block && block->is() == BlockState::Used) {
    message << "byte " << (address - block->start()) << " of the allocation ";
    message.hex(block->start()) << " of " << block->requested.load() << " bytes on card "
                                << static_cast<uint64_t>(card.index());
    if (segment && segment->asleep.load()) message << ", in a suspended pool";
  } else if (block) {
    message << "not allocated: in a freed block of " << block->size() << " bytes of card "
            << static_cast<uint64_t>(card.index());
  } else {
    message << "not allocated: outside every segment of card " << static_cast<uint64_t>(card.index());
  }
}

const char* running_here(const Driver& driver) {
  const pid_t thread = static_cast<pid_t>(syscall(SYS_gettid));
  const char* name = nullptr;
  for (const auto& card : driver.cards)
    card->each_stream([&](const Stream& stream) {
      if (stream.is_worker(thread)) name = stream.running() ? stream.running() : "a launch's destructor";
    });
  return name;
}

// Writes an explanation if the address belongs to a card; returns whether it does.
bool explain(uintptr_t address) {
  const Driver* const driver = watched.load();
  if (!driver) return false;
  for (const auto& card : driver->cards) {
    const Arena& arena = card->arena();
    const bool device = arena.contains(address);
    if (!device && !arena.contains_kernel(address)) continue;
    const char* const launch = running_here(*driver);
    Message message;
    message << "\nbackplane sim: ";
    if (launch)
      message << "the launch '" << launch << "' ";
    else
      message << "the host ";
    message << "accessed " << (device ? "the device address " : "a card's memory by its kernel address ");
    message.hex(address) << ": ";
    describe_address(message, *card, device ? address : address - static_cast<uintptr_t>(arena.kernel_offset()));
    message << ". ";
    if (launch && device)
      message << "A launch must translate device pointers (bpsim_translate) before it uses them.\n";
    else if (launch)
      message << "It exceeds its tensors, or uses one that was freed or whose pool is suspended.\n";
    else
      message << "The host cannot read or write a card's memory: copy it first (tensor.cpu(), bpsim_copy), or do the "
                 "work in a launch.\n";
    message.send();
    return true;
  }
  return false;
}

// Handles an access to pinned memory that copies in flight have protected: reports it and opens the page, so that the
// access can be repeated. If races are to fail, the card has failed. Locking and allocating is safe here, because the
// host was accessing memory that only the user touches, so it holds no lock of the driver or of malloc.
bool allow_reported_access(uintptr_t address) {
  Driver* const driver = watched.load();
  if (!driver || !driver->races.on()) return false;
  PinnedGuard::Flight copy;
  if (!driver->races.guard().touched(address, &copy)) return false;
  if (copy.position == 0) return true;
  driver->races.count_host_access();
  const uint64_t card = copy.stream / BPSIM_MAX_STREAMS, stream = copy.stream % BPSIM_MAX_STREAMS;
  Message message;
  message << "missing synchronization: the host " << (copy.written ? "accessed " : "wrote ");
  message.hex(address) << ", byte " << (address - copy.first) << " of " << (copy.last - copy.first)
                       << " in pinned memory that '" << copy.name << "' on stream " << stream << " of card " << card
                       << (copy.written ? " writes" : " reads")
                       << ", without waiting for it. Wait first for an event that is recorded after the copy, or "
                          "for the stream (event.synchronize, stream.synchronize)";
  if (driver->races.fails()) driver->cards[card]->fail_now(message.text());
  Message line;
  line << "\nbackplane sim: " << message.text().c_str() << ".\n";
  line.send();
  return true;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  Before* const previous = before_of(signal);
  // si_addr is valid only if the kernel raised the signal for an access.
  const uintptr_t address = info->si_code > 0 ? reinterpret_cast<uintptr_t>(info->si_addr) : 0;
  if (address && allow_reported_access(address)) {
    errno = error;
    return;
  }
  if (previous->circular.load() && previous->entered.exchange(true)) {  // the explanation was written before
    struct sigaction usual = {};
    usual.sa_handler = SIG_DFL;
    sigaction(signal, &usual, nullptr);
    if (info->si_code <= 0) raise(signal);
    return;
  }
  const bool ours = address && explain(address);
  const struct sigaction& action = previous->action;
  if (!ours && (action.sa_flags & SA_SIGINFO) && action.sa_sigaction) {
    action.sa_sigaction(signal, info, context);
  } else if (!ours && action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN) {
    action.sa_handler(signal);
  } else if (ours || action.sa_handler == SIG_DFL || info->si_code > 0) {
    // Restores the previous handler: the access is repeated on return and ends the process, with a traceback if that
    // handler prints one. A signal that was sent by a process is not repeated, so it is raised again.
    sigaction(signal, &action, nullptr);
    if (info->si_code <= 0) raise(signal);
  }
  errno = error;
}

}  // namespace

void watch_accesses(Driver* driver) { watched.store(driver); }

bpsim_status install_access_handler() {
  for (Before& each : before) {
    struct sigaction current = {};
    sigaction(each.signal, nullptr, &current);
    if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == &on_fault) continue;
    struct sigaction ours = {};
    ours.sa_sigaction = &on_fault;
    sigemptyset(&ours.sa_mask);
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    each.action = current;
    if (each.known.exchange(true)) each.circular.store(true);
    if (sigaction(each.signal, &ours, nullptr) != 0)
      return fail(BPSIM_SYSTEM, "the system refused a handler for signal %d (%s)", each.signal, std::strerror(errno));
  }
  return BPSIM_OK;
}

void remove_access_handler() {
  for (Before& each : before) {
    if (!each.known.load()) continue;
    struct sigaction current = {};
    sigaction(each.signal, nullptr, &current);
    if (!(current.sa_flags & SA_SIGINFO) || current.sa_sigaction != &on_fault) continue;
    sigaction(each.signal, &each.action, nullptr);
    each.known.store(each.circular.load());  // no other handler refers to ours, unless one was installed later
  }
}

}  // namespace backplane::sim::driver
