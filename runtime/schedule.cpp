// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/schedule.h>

namespace sherd {

int Schedule::add_stream(const std::string& name) {
  streams_.push_back(name);
  return static_cast<int>(streams_.size()) - 1;
}

void Schedule::add(const Work& work) {
  entries_.push_back({.kind = Kind::work,
                      .stream = static_cast<std::int16_t>(current_stream()),
                      .index = static_cast<std::int32_t>(works_.size())});
  works_.push_back(work);
}

void Schedule::enter(int stream) {
  inside_.push_back(stream);
}

void Schedule::leave() {
  SHERD_INTERNAL_CHECK(!inside_.empty(), "the schedule is inside no stream");
  inside_.pop_back();
}

void Schedule::wait(int stream, int for_stream, std::int64_t until) {
  if (until <= cleared_) return;
  entries_.push_back({.kind = Kind::wait,
                      .stream = static_cast<std::int16_t>(stream),
                      .index = for_stream,
                      .value = until - cleared_});
}

void Schedule::host_wait(int for_stream, std::int64_t until) {
  if (until <= cleared_) return;
  entries_.push_back({.kind = Kind::host_wait, .index = for_stream, .value = until - cleared_});
}

std::int32_t Schedule::begin_scope(std::string_view name, std::string_view category,
                                   std::string_view track) {
  const auto begin = static_cast<std::int32_t>(entries_.size());
  entries_.push_back({.kind = Kind::scope_begin,
                      .stream = static_cast<std::int16_t>(inside_.empty() ? kHost : inside_.back()),
                      .index = intern(name),
                      .track = intern(track),
                      .value = intern(category)});
  return begin;
}

void Schedule::end_scope(std::int32_t begin) {
  const Entry& opened = entries_.at(static_cast<std::size_t>(begin));
  SHERD_INTERNAL_CHECK(opened.kind == Kind::scope_begin, "entry {} begins no scope", begin);
  entries_.push_back({.kind = Kind::scope_end, .stream = opened.stream, .index = begin});
}

void Schedule::memory(MemoryPool pool, MemoryCategory category, std::int64_t live) {
  entries_.push_back({.kind = Kind::memory,
                      .pool = pool,
                      .index = static_cast<std::int32_t>(category),
                      .value = live});
}

void Schedule::clear() {
  cleared_ = position();
  entries_.clear();
  works_.clear();
}

std::int32_t Schedule::intern(std::string_view text) {
  const auto found = text_index_.find(text);
  if (found != text_index_.end()) return found->second;
  const auto index = static_cast<std::int32_t>(texts_.size());
  texts_.emplace_back(text);
  text_index_.emplace(texts_.back(), index);
  return index;
}

}  // namespace sherd
