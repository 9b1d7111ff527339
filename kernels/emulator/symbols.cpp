// SPDX-License-Identifier: Apache-2.0
#include "symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

namespace emulator {
namespace {

struct Module {
  std::uintptr_t address, base;
  std::string file;
};

// The file that `address` was loaded from, and where.
int find_module(dl_phdr_info* info, std::size_t, void* data) {
  Module& module = *static_cast<Module*>(data);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    const std::uintptr_t low = info->dlpi_addr + header.p_vaddr;
    if (header.p_type != PT_LOAD || module.address < low ||
        module.address >= low + header.p_memsz) {
      continue;
    }
    module.base = info->dlpi_addr;
    module.file = info->dlpi_name != nullptr && info->dlpi_name[0] != '\0' ? info->dlpi_name
                                                                           : "/proc/self/exe";
    return 1;
  }
  return 0;
}

template <class T>
const T* at(const std::vector<char>& file, std::size_t offset, std::size_t count = 1) {
  if (offset > file.size() || count > (file.size() - offset) / sizeof(T)) return nullptr;
  return reinterpret_cast<const T*>(file.data() + offset);
}

std::string demangled(const char* name) {
  int status;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

}  // namespace

std::string function_name(const void* address) {
  Module module{reinterpret_cast<std::uintptr_t>(address), 0, ""};
  if (dl_iterate_phdr(find_module, &module) == 0) return "";
  std::ifstream stream(module.file, std::ios::binary | std::ios::ate);
  if (!stream) return "";
  std::vector<char> file(static_cast<std::size_t>(stream.tellg()));
  stream.seekg(0);
  stream.read(file.data(), static_cast<std::streamsize>(file.size()));
  const auto* header = at<ElfW(Ehdr)>(file, 0);
  if (header == nullptr || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return "";
  const auto* sections = at<ElfW(Shdr)>(file, header->e_shoff, header->e_shnum);
  if (sections == nullptr) return "";
  const std::uintptr_t wanted = module.address - module.base;
  for (int i = 0; i < header->e_shnum; ++i) {
    const ElfW(Shdr)& section = sections[i];
    if (section.sh_type != SHT_SYMTAB || section.sh_link >= header->e_shnum) continue;
    const ElfW(Shdr)& strings = sections[section.sh_link];
    const std::size_t count = section.sh_size / sizeof(ElfW(Sym));
    const auto* symbols = at<ElfW(Sym)>(file, section.sh_offset, count);
    const char* names = at<char>(file, strings.sh_offset, strings.sh_size);
    if (symbols == nullptr || names == nullptr) continue;
    for (std::size_t k = 0; k < count; ++k) {
      if (symbols[k].st_value == wanted && (symbols[k].st_info & 0xF) == STT_FUNC &&
          symbols[k].st_name < strings.sh_size) {
        return demangled(names + symbols[k].st_name);
      }
    }
  }
  return "";
}

}  // namespace emulator
