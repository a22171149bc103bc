//! The process by which an `mpiexec` has started the ranks of a machine.

use std::fs;

/// An id that ranks of one machine share whom an `mpiexec` has started that gives none: its proxy process, which is an ancestor of theirs.
pub(super) fn proxy_id() -> Option<String> {
    const PROXY: &str = "hydra_pmi_proxy";
    let mut process = std::process::id();
    for _ in 0..32 {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        let (name, parent, start) = name_parent_and_start(&stat)?;
        if name == PROXY {
            return Some(format!("hydra-{process}-{start}"));
        }
        process = Some(parent).filter(|parent| *parent > 1)?;
    }
    None
}

/// Of a line of `/proc/PID/stat`. The name may have spaces and parentheses in it.
fn name_parent_and_start(stat: &str) -> Option<(&str, u32, u64)> {
    let (before, after) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    let mut fields = after.split_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    Some((name, parent, fields.nth(17)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_and_the_start_of_a_process_are_found_whatever_it_is_called() {
        let stat = "7 (a ) b (c)) S 3 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 123456 99 100 1";
        assert_eq!(name_parent_and_start(stat), Some(("a ) b (c)", 3, 123_456)));
        for broken in ["", "7 name S 3", "7 (name) S x", "7 (name) S 3 7"] {
            assert_eq!(name_parent_and_start(broken), None, "{broken}");
        }
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        let (_, parent, start) = name_parent_and_start(&own).unwrap();
        assert_eq!(parent, std::os::unix::process::parent_id());
        assert!(start > 0);
    }
}
