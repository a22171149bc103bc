//! Long buffers in huge pages.

use bytemuck::{AnyBitPattern, NoUninit};

use crate::sys;

/// From so many bytes on memory is worth a huge page; NumPy has the same rule for its arrays.
const LEAST: usize = 4 << 20;

/// Asks the kernel to back a long buffer with huge pages, where it has them for those that ask. Best before the first write, which brings
/// the pages. Reading and writing several buffers of many MiB, and letting the kernel copy out of them, as
/// [`shm`](crate::shm) does, is two to three times as fast in them.
///
/// Does nothing for less than 4 MiB; what the buffer holds stays.
pub fn prefer_huge_pages<T: AnyBitPattern + NoUninit>(memory: &mut [T]) {
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(memory);
    if bytes.len() >= LEAST {
        sys::advise_huge_pages(bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The flags of the mapping in which `address` lies.
    fn flags_at(address: usize) -> String {
        let mappings = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_here = false;
        for line in mappings.lines() {
            let bounds = line.split_whitespace().next().and_then(|range| range.split_once('-'));
            let parse = |text| usize::from_str_radix(text, 16).ok();
            if let Some((start, end)) = bounds.and_then(|(start, end)| Some((parse(start)?, parse(end)?))) {
                is_here = (start..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_here) {
                return flags.into();
            }
        }
        panic!("no mapping has {address:#x}");
    }

    #[test]
    fn long_buffers_ask_for_huge_pages_and_keep_what_they_hold() {
        if !fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap() {
            println!("skipped: this kernel has no huge pages for those that ask");
            return;
        }
        let mut memory = vec![7u32; 4 << 20];
        prefer_huge_pages(&mut memory);
        let middle = &raw const memory[2 << 20];
        assert!(flags_at(middle.addr()).split_whitespace().any(|flag| flag == "hg"));
        assert!(memory.iter().all(|value| *value == 7));
        prefer_huge_pages::<u8>(&mut []);
        prefer_huge_pages(&mut memory[..1]);
    }
}
