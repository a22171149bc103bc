//! Memory of this process.

/// The most memory that this process has held, in bytes: `VmHWM` of `/proc/self/status`; 0 where there is none.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.trim().parse().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_holds_some_memory() {
        assert!(super::peak_rss_bytes() > 1 << 20);
    }
}
