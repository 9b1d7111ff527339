// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/unpickler.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

namespace sherd {
namespace {

// Python's own, under the module names of Python 2 (which protocol 2 writes) and 3.
constexpr std::array<std::string_view, 16> kCallable{
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "argparse.Namespace",
    "__builtin__.set",
    "builtins.set",
    "__builtin__.frozenset",
    "builtins.frozenset",
    "__builtin__.bytearray",
    "builtins.bytearray",
    "__builtin__.complex",
    "builtins.complex",
    "_codecs.encode",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
};
// What a defaultdict makes, and bytes for an empty one.
constexpr std::array<std::string_view, 10> kConstant{
    "__builtin__.list", "builtins.list", "__builtin__.dict",  "builtins.dict",
    "__builtin__.int",  "builtins.int",  "__builtin__.float", "builtins.float",
    "__builtin__.str",  "builtins.str"};

// Operations by their byte; Python's pickle.py lists them all.
enum Op : std::uint8_t {
  mark = '(',
  stop = '.',
  pop = '0',
  pop_mark = '1',
  dup = '2',
  none = 'N',
  new_true = 0x88,
  new_false = 0x89,
  binint = 'J',
  binint1 = 'K',
  binint2 = 'M',
  long1 = 0x8a,
  long4 = 0x8b,
  binfloat = 'G',
  binunicode = 'X',
  short_binunicode = 0x8c,
  binunicode8 = 0x8d,
  binstring = 'T',
  short_binstring = 'U',
  binbytes = 'B',
  short_binbytes = 'C',
  binbytes8 = 0x8e,
  bytearray8 = 0x96,
  empty_tuple = ')',
  tuple = 't',
  tuple1 = 0x85,
  tuple2 = 0x86,
  tuple3 = 0x87,
  empty_list = ']',
  append = 'a',
  appends = 'e',
  empty_dict = '}',
  setitem = 's',
  setitems = 'u',
  empty_set = 0x8f,
  additems = 0x90,
  make_frozenset = 0x91,
  binput = 'q',
  long_binput = 'r',
  memoize = 0x94,
  binget = 'h',
  long_binget = 'j',
  global = 'c',
  stack_global = 0x93,
  inst = 'i',
  reduce = 'R',
  newobj = 0x81,
  build = 'b',
  binpersid = 'Q',
  proto = 0x80,
  frame = 0x95,
};

class Machine {
 public:
  Machine(std::span<const std::uint8_t> bytes, const std::string& path, const PickleNames& names)
      : bytes_(bytes), path_(path), names_(names) {}

  PickleTree run() {
    // Values that cost nothing however often they come.
    none_ = make(PickleNone{});
    false_ = make(false);
    true_ = make(true);
    no_items_ = make(PickleTuple{});
    check(!bytes_.empty() && bytes_[0] == Op::proto,
          "expected 0x80 and the protocol's number first");
    while (step()) {
    }
    tree_.used = at_;
    return std::move(tree_);
  }

 private:
  template <typename... Args>
  [[noreturn]] void fail_here(fmt::format_string<Args...> format, Args&&... args) const {
    fail("pickle in '{}', byte {}: {}", path_, start_,
         fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void check(bool condition, fmt::format_string<Args...> format, Args&&... args) const {
    if (!condition) fail_here(format, std::forward<Args>(args)...);
  }

  std::span<const std::uint8_t> take(std::uint64_t count) {
    check(count <= bytes_.size() - at_, "it ends early: {} bytes are expected, {} follow", count,
          bytes_.size() - at_);
    const auto taken = bytes_.subspan(at_, count);
    at_ += count;
    return taken;
  }
  std::uint64_t number(std::size_t width) {  // little-endian
    std::uint64_t value = 0;
    const auto digits = take(width);
    for (std::size_t i = width; i-- > 0;) value = value << 8 | digits[i];
    return value;
  }
  std::string_view text(std::uint64_t count) {
    const auto taken = take(count);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  std::string_view line() {
    const auto rest = bytes_.subspan(at_);
    const auto end = std::ranges::find(rest, '\n');
    check(end != rest.end(), "it ends early: inside a name");
    const std::string_view found = text(static_cast<std::uint64_t>(end - rest.begin()));
    ++at_;
    return found;
  }

  PickleId make(PickleValue value) {
    tree_.values.push_back(std::move(value));
    return static_cast<PickleId>(tree_.values.size() - 1);
  }
  void push(PickleId id) { stack_.push_back(id); }
  void push_new(PickleValue value) { push(make(std::move(value))); }
  // Below the last mark nothing can be taken.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  PickleId take_top() {
    check(stack_.size() > floor(), "it takes a value that is not there");
    const PickleId id = stack_.back();
    stack_.pop_back();
    return id;
  }
  PickleId top() const {
    check(stack_.size() > floor(), "it uses a value that is not there");
    return stack_.back();
  }
  // The values from the last mark on.
  std::vector<PickleId> take_marked() {
    check(!marks_.empty(), "it takes values up to a mark that is not there");
    std::vector<PickleId> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                                stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  std::vector<PickleId> take_last(std::size_t count) {
    std::vector<PickleId> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = take_top();
    return items;
  }

  template <typename T>
  T& top_as(const char* expected) {
    PickleValue& value = tree_.values[top()];
    T* found = std::get_if<T>(&value);
    check(found != nullptr, "it adds to {}, expected {}", kind_of(value), expected);
    return *found;
  }

  void set_items(const std::vector<PickleId>& items) {
    check(items.size() % 2 == 0, "a dict gets a key without a value");
    auto& target = top_as<PickleDict>("a dict").items;
    for (std::size_t i = 0; i < items.size(); i += 2) target.emplace_back(items[i], items[i + 1]);
  }
  template <typename T>
  void add_items(const char* expected, const std::vector<PickleId>& items) {
    auto& target = top_as<T>(expected).items;
    target.insert(target.end(), items.begin(), items.end());
  }

  void integer(std::uint64_t size) {
    const auto digits = take(size);
    if (size > 8) return push_new(PickleBigInteger{digits});
    std::uint64_t value = size > 0 && (digits[size - 1] & 0x80u) != 0 ? ~std::uint64_t{0} : 0;
    for (std::size_t i = size; i-- > 0;) value = value << 8 | digits[i];
    push_new(static_cast<std::int64_t>(value));
  }
  void real() {
    std::uint64_t bits = 0;
    for (const std::uint8_t byte : take(8)) bits = bits << 8 | byte;  // big-endian
    push_new(std::bit_cast<double>(bits));
  }

  void remember(std::uint64_t index) {
    // Writers count from 0, so an index past the pickle's length is no index.
    check(index < bytes_.size(), "it remembers a value as number {}", index);
    if (index >= memo_.size()) memo_.resize(index + 1, kNothing);
    memo_[index] = top();
    memo_next_ = std::max(memo_next_, index + 1);
  }
  void recall(std::uint64_t index) {
    check(index < memo_.size() && memo_[index] != kNothing,
          "it asks for value number {}, which was never remembered", index);
    push(memo_[index]);
  }

  [[noreturn]] void refuse(std::string_view module, std::string_view name) const {
    fail("'{}': it wants to build {}.{}, which could run code; {}", path_, printable(module),
         printable(name), names_.advice);
  }
  static std::string printable(std::string_view text) {
    const std::string quoted = quote(text);
    return quoted.substr(1, quoted.size() - 2);
  }

  void find_global(std::string_view module, std::string_view name) {
    constexpr std::size_t kLongest = 200;  // of the listed ones; what follows costs that much
    if (module.size() + name.size() > kLongest) refuse(module, name);
    const std::string whole = std::string(module) + "." + std::string(name);
    const auto among = [&](const auto& list) {
      return std::ranges::find(list, whole) != list.end();
    };
    if (!among(kCallable) && !among(kConstant) && !among(names_.callable) &&
        !among(names_.constant) && !among(names_.objects)) {
      refuse(module, name);
    }
    push_new(PickleGlobal{module, name});
  }

  void call(bool only_new) {
    const PickleId arguments = take_top(), callee = take_top();
    const auto* global = tree_.get<PickleGlobal>(callee);
    const auto* tuple = tree_.get<PickleTuple>(arguments);
    check(global != nullptr, "it calls {}, expected a function", kind_of(tree_[callee]));
    check(tuple != nullptr, "it calls with {}, expected a tuple of arguments",
          kind_of(tree_[arguments]));
    const std::string name = tree_.global_name(callee);
    const auto among = [&](const auto& list) {
      return std::ranges::find(list, name) != list.end();
    };
    if (only_new) {
      check(name == "argparse.Namespace" || among(names_.objects),
            "it makes a bare {}, expected the usual call", name);
    } else {
      check(among(kCallable) || among(names_.callable), "it calls {}, which is not a function",
            name);
    }
    if (name == "collections.defaultdict") return push_new(PickleDict{});
    if (name == "collections.OrderedDict") {
      check(tuple->items.empty(), "an OrderedDict gets {} arguments, expected none",
            tuple->items.size());
      return push_new(PickleDict{});
    }
    push_new(PickleCall{callee, arguments, none_});
  }

  void set_state() {
    const PickleId state = take_top();
    PickleValue& target = tree_.values[top()];
    // Attributes of an OrderedDict (torch's _metadata) say nothing about tensors.
    if (std::holds_alternative<PickleDict>(target)) return;
    auto* made = std::get_if<PickleCall>(&target);
    check(made != nullptr, "it sets attributes of {}", kind_of(target));
    made->state = state;
  }

  bool step() {
    start_ = at_;
    const std::uint8_t op = take(1)[0];
    switch (op) {
      case Op::proto: {
        const std::uint64_t protocol = number(1);
        check(protocol >= 2 && protocol <= 5, "protocol {}, expected 2 to 5", protocol);
        return true;
      }
      case Op::frame: {  // says how much to read at once
        const std::uint64_t size = number(8);
        check(size <= bytes_.size() - at_, "a frame of {} bytes, {} follow", size,
              bytes_.size() - at_);
        return true;
      }
      case Op::stop:
        tree_.root = take_top();
        check(marks_.empty() && stack_.empty(), "it ends with values left over");
        return false;
      case Op::mark: marks_.push_back(stack_.size()); return true;
      case Op::pop:
        if (stack_.size() == floor() && !marks_.empty()) {
          marks_.pop_back();
        } else {
          take_top();
        }
        return true;
      case Op::pop_mark: take_marked(); return true;
      case Op::dup: push(top()); return true;
      case Op::none: push(none_); return true;
      case Op::new_true: push(true_); return true;
      case Op::new_false: push(false_); return true;
      case Op::binint: push_new(std::int64_t{static_cast<std::int32_t>(number(4))}); return true;
      case Op::binint1: push_new(static_cast<std::int64_t>(number(1))); return true;
      case Op::binint2: push_new(static_cast<std::int64_t>(number(2))); return true;
      case Op::long1: integer(number(1)); return true;
      case Op::long4: integer(number(4)); return true;
      case Op::binfloat: real(); return true;
      case Op::short_binunicode:
      case Op::short_binstring: push_new(text(number(1))); return true;
      case Op::binunicode:
      case Op::binstring: push_new(text(number(4))); return true;
      case Op::binunicode8: push_new(text(number(8))); return true;
      case Op::short_binbytes: push_new(PickleBytes{take(number(1))}); return true;
      case Op::binbytes: push_new(PickleBytes{take(number(4))}); return true;
      case Op::binbytes8:
      case Op::bytearray8: push_new(PickleBytes{take(number(8))}); return true;
      default: return step_on_values(op);
    }
  }

  bool step_on_values(std::uint8_t op) {
    switch (op) {
      case Op::empty_tuple: push(no_items_); break;
      case Op::tuple: push_new(PickleTuple{take_marked()}); break;
      case Op::tuple1: push_new(PickleTuple{take_last(1)}); break;
      case Op::tuple2: push_new(PickleTuple{take_last(2)}); break;
      case Op::tuple3: push_new(PickleTuple{take_last(3)}); break;
      case Op::empty_list: push_new(PickleList{}); break;
      case Op::append: add_items<PickleList>("a list", take_last(1)); break;
      case Op::appends: add_items<PickleList>("a list", take_marked()); break;
      case Op::empty_dict: push_new(PickleDict{}); break;
      case Op::setitem: set_items(take_last(2)); break;
      case Op::setitems: set_items(take_marked()); break;
      case Op::empty_set: push_new(PickleSet{}); break;
      case Op::additems: add_items<PickleSet>("a set", take_marked()); break;
      case Op::make_frozenset: push_new(PickleSet{take_marked()}); break;
      case Op::binput: remember(number(1)); break;
      case Op::long_binput: remember(number(4)); break;
      case Op::memoize: remember(memo_next_); break;
      case Op::binget: recall(number(1)); break;
      case Op::long_binget: recall(number(4)); break;
      case Op::global: {
        const std::string_view module = line();
        find_global(module, line());
        break;
      }
      case Op::stack_global: {
        const PickleId name = take_top(), module = take_top();
        const auto* name_text = tree_.get<std::string_view>(name);
        const auto* module_text = tree_.get<std::string_view>(module);
        check(name_text != nullptr && module_text != nullptr,
              "a name is made of {} and {}, expected two strings", kind_of(tree_[module]),
              kind_of(tree_[name]));
        find_global(*module_text, *name_text);
        break;
      }
      case Op::inst: {
        const std::string_view module = line();
        refuse(module, line());
      }
      case Op::reduce: call(false); break;
      case Op::newobj: call(true); break;
      case Op::build: set_state(); break;
      case Op::binpersid: push_new(PicklePersistent{take_top()}); break;
      default:
        fail_here(
            "operation 0x{:02x}{} is not one that protocols 2 to 5 write for tensors and plain "
            "containers; {}",
            op, op > 0x20 && op < 0x7f ? fmt::format(" ('{}')", static_cast<char>(op)) : "",
            names_.advice);
    }
    return true;
  }

  static constexpr PickleId kNothing = std::numeric_limits<PickleId>::max();

  std::span<const std::uint8_t> bytes_;
  const std::string& path_;
  const PickleNames& names_;
  std::size_t at_ = 0, start_ = 0;
  PickleTree tree_;
  std::vector<PickleId> stack_, memo_;
  std::uint64_t memo_next_ = 0;
  std::vector<std::size_t> marks_;
  PickleId none_ = 0, false_ = 0, true_ = 0, no_items_ = 0;
};

}  // namespace

const PickleId* PickleTree::find(const PickleDict& dict, std::string_view key) const {
  for (auto item = dict.items.rbegin(); item != dict.items.rend(); ++item) {
    const auto* text = get<std::string_view>(item->first);
    if (text != nullptr && *text == key) return &item->second;
  }
  return nullptr;
}

std::string PickleTree::global_name(PickleId id) const {
  const auto* global = get<PickleGlobal>(id);
  if (global == nullptr) return "";
  return std::string(global->module) + "." + std::string(global->name);
}

std::string_view kind_of(const PickleValue& value) {
  static constexpr std::array<std::string_view, 14> kKinds{
      "None",    "a bool", "an int", "a float", "a str",  "an int",    "bytes",
      "a tuple", "a list", "a set",  "a dict",  "a name", "an object", "a reference"};
  static_assert(std::variant_size_v<PickleValue> == kKinds.size());
  return kKinds[value.index()];
}

PickleTree read_pickle(std::span<const std::uint8_t> bytes, const std::string& path,
                       const PickleNames& names) {
  SHERD_CHECK(bytes.size() <= kMaxPickle, "pickle in '{}': it has {} bytes, at most {} are read",
              path, bytes.size(), kMaxPickle);
  return Machine(bytes, path, names).run();
}

}  // namespace sherd
