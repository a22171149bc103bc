//! The peak of a processor on paper: cores × FLOP a cycle × clock.

use std::collections::BTreeSet;
use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// What a processor's cores can do in f32.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cores {
    /// Cores that this process may use; two hardware threads of a core are one.
    pub(super) count: usize,
    /// FLOP/s of one.
    pub(super) flops: f64,
    /// How that comes about, in words.
    pub(super) formula: String,
}

impl Cores {
    /// Those of this machine.
    ///
    /// # Errors
    /// What is not known of it.
    pub(super) fn here() -> Result<Self, String> {
        let text = fs::read_to_string("/proc/cpuinfo").map_err(|error| format!("/proc/cpuinfo: {error}"))?;
        let (per_cycle, units) = flop_per_cycle(&CpuInfo::of(&text))?;
        let (hertz, source) = clock(&text)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Cores {
            count: cores(&siblings(), threads),
            flops: f64::from(per_cycle) * hertz,
            formula: format!("core(s) × {per_cycle} FLOP a cycle ({units}) × {:.2} GHz ({source})", hertz / 1e9),
        })
    }
}

/// What `/proc/cpuinfo` says of the first processor.
struct CpuInfo<'a>(Vec<(&'a str, &'a str)>);

impl<'a> CpuInfo<'a> {
    fn of(text: &'a str) -> Self {
        let lines = text.lines().take_while(|line| !line.trim().is_empty());
        CpuInfo(lines.filter_map(|line| line.split_once(':')).map(|(key, value)| (key.trim(), value.trim())).collect())
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.0.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }

    /// A number, decimal or after `0x`.
    fn number(&self, key: &str) -> Option<u32> {
        let text = self.text(key)?;
        text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |digits| u32::from_str_radix(digits, 16).ok())
    }

    fn has(&self, flag: &str) -> bool {
        self.text("flags").is_some_and(|flags| flags.split_whitespace().any(|known| known == flag))
    }
}

/// FLOP that a core ends in a cycle with its widest units for fused multiply and add, and those units in words. `units × lanes of f32 × 2`.
///
/// Units by family and model are those of Intel's Optimization Reference Manual (volume 1, the chapters on each microarchitecture), AMD's
/// Software Optimization Guides for families 17h, 19h and 1Ah, and Arm's Software Optimization Guides of the Neoverse cores.
fn flop_per_cycle(info: &CpuInfo<'_>) -> Result<(u32, &'static str), String> {
    let units = match info.text("vendor_id") {
        Some("GenuineIntel") => intel(info),
        Some("AuthenticAMD") => amd(info),
        _ => arm(info),
    };
    let unknown = || {
        let name = info.text("model name").unwrap_or("this processor");
        let of = |key: &str| info.text(key).map_or(String::new(), |value| format!(", {key} {value}"));
        let place: String = ["cpu family", "model", "CPU implementer", "CPU part"].map(of).concat();
        format!("the units of {name}{place} are not known")
    };
    let (count, bits, what) = units.ok_or_else(unknown)?;
    Ok((count * bits / 32 * 2, what))
}

/// Number of units, their width in bits, and both in words.
type Units = (u32, u32, &'static str);

const TWO_OF_512: Units = (2, 512, "2 units of 512 bits");
const TWO_OF_256: Units = (2, 256, "2 units of 256 bits");
const TWO_OF_128: Units = (2, 128, "2 units of 128 bits");
const FOUR_OF_128: Units = (4, 128, "4 units of 128 bits");

fn intel(info: &CpuInfo<'_>) -> Option<Units> {
    // A hypervisor may keep vector units from its guests.
    let (avx512, fma) = (info.has("avx512f"), info.has("fma") && info.has("avx2"));
    if info.number("cpu family")? != 6 || !fma {
        return None;
    }
    match info.number("model")? {
        // Haswell, Broadwell, Skylake, Kaby Lake, Coffee Lake, Comet Lake.
        0x3C | 0x45 | 0x46 | 0x3F | 0x3D | 0x47 | 0x4F | 0x56 | 0x4E | 0x5E | 0x8E | 0x9E | 0xA5 | 0xA6 => {
            Some(TWO_OF_256)
        }
        // Skylake-SP, Cascade Lake, Cooper Lake: two units of 512 bits, or one, by the name alone.
        0x55 if avx512 => {
            let name = info.text("model name").unwrap_or_default();
            ["Platinum", "Gold 6", "Xeon(R) W-", "Core(TM) i9"]
                .iter()
                .any(|part| name.contains(part))
                .then_some(TWO_OF_512)
        }
        // Ice Lake-SP, Sapphire, Emerald and Granite Rapids.
        0x6A | 0x6C | 0x8F | 0xCF | 0xAD | 0xAE if avx512 => Some(TWO_OF_512),
        0x55 | 0x6A | 0x6C | 0x8F | 0xCF | 0xAD | 0xAE => Some(TWO_OF_256),
        // Ice Lake, Tiger Lake and Rocket Lake have one unit of 512 bits, made of two of 256.
        0x7D | 0x7E | 0x8C | 0x8D | 0xA7 => Some(TWO_OF_256),
        // Of those with cores of two kinds nobody knows which will run.
        _ => None,
    }
}

fn amd(info: &CpuInfo<'_>) -> Option<Units> {
    if !info.has("fma") || !info.has("avx2") {
        return None;
    }
    match (info.number("cpu family")?, info.number("model")?) {
        // Zen and Zen+; Zen 2.
        (0x17, 0x00..=0x2F) => Some(TWO_OF_128),
        (0x17, _) => Some(TWO_OF_256),
        // Zen 3; Zen 4, which does 512 bits in two halves.
        (0x19, 0x00..=0xAF) => Some(TWO_OF_256),
        // Zen 5 of servers and desktops; that of laptops in halves.
        (0x1A, 0x00..=0x1F | 0x40..=0x4F) if info.has("avx512f") => Some(TWO_OF_512),
        (0x1A, 0x00..=0x4F | 0x60..=0x6F) => Some(TWO_OF_256),
        _ => None,
    }
}

fn arm(info: &CpuInfo<'_>) -> Option<Units> {
    match (info.number("CPU implementer")?, info.number("CPU part")?) {
        // Neoverse N1, N2; V1, V2.
        (0x41, 0xD0C | 0xD49) => Some(TWO_OF_128),
        (0x41, 0xD40 | 0xD4F) => Some(FOUR_OF_128),
        _ => None,
    }
}

/// Cores among the hardware threads of a machine, each given by the list of those that share its core; no more than the `threads` that this
/// process may run at once.
fn cores(siblings: &[String], threads: usize) -> usize {
    match siblings.iter().collect::<BTreeSet<_>>().len() {
        0 => threads,
        cores => cores.min(threads),
    }
}

/// For each hardware thread, those of its core, as sysfs lists them; nothing where it does not.
fn siblings() -> Vec<String> {
    let entries = fs::read_dir("/sys/devices/system/cpu").into_iter().flatten().flatten();
    let lists = entries.map(|entry| entry.path().join("topology/thread_siblings_list"));
    lists.filter_map(|path| fs::read_to_string(path).ok()).collect()
}

/// Hertz, and where they are from: the most that the kernel says the processor can do, or what it was measured to do, where a virtual
/// machine tells the base clock alone.
fn clock(cpuinfo: &str) -> Result<(f64, &'static str), String> {
    let most = fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").ok();
    if let Some(kilohertz) = most.and_then(|text| text.trim().parse::<f64>().ok()).filter(|khz| *khz > 0.0) {
        return Ok((kilohertz * 1e3, "the maximum by cpufreq"));
    }
    if cfg!(target_arch = "x86_64") {
        return Ok((measured_clock(), "measured"));
    }
    let stated = CpuInfo::of(cpuinfo).text("cpu MHz").and_then(|text| text.parse::<f64>().ok());
    stated
        .map(|megahertz| (megahertz * 1e6, "/proc/cpuinfo"))
        .ok_or_else(|| "the clock of the processor is not known".into())
}

/// Steps of three shifts, each followed by an exclusive or, wait for one another: on every x86 processor each takes one cycle, which makes
/// six a step. The best of some tries, which others on the machine can only make longer.
fn measured_clock() -> f64 {
    const STEPS: u32 = 200_000;
    const CYCLES: f64 = 6.0;
    const TIME: Duration = Duration::from_millis(20);
    let (began, mut best) = (Instant::now(), f64::INFINITY);
    while began.elapsed() < TIME {
        let start = Instant::now();
        let mut x = black_box(88_172_645_463_325_252_u64);
        let mut left = STEPS;
        // No iterator, of which a debug build makes a call for each step.
        while left > 0 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            left -= 1;
        }
        black_box(x);
        best = best.min(start.elapsed().as_secs_f64());
    }
    f64::from(STEPS) * CYCLES / best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per_cycle(text: &str) -> Result<u32, String> {
        flop_per_cycle(&CpuInfo::of(text)).map(|(flop, _)| flop)
    }

    fn x86(vendor: &str, family: u32, model: u32, name: &str, flags: &str) -> String {
        format!(
            "processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\nflags\t\t: {flags}\n\n\
             processor\t: 1\nmodel\t\t: 1\n"
        )
    }

    #[test]
    fn flop_a_cycle_are_units_times_lanes_times_two() {
        let wide = "sse2 fma avx2 avx512f";
        for (expected, text) in [
            // 2 units × 16 lanes × 2, × 8 lanes, × 4 lanes.
            (64, x86("GenuineIntel", 6, 0x8F, "Xeon", wide)),
            (64, x86("GenuineIntel", 6, 0x55, "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz", wide)),
            (32, x86("GenuineIntel", 6, 0x8F, "Xeon", "fma avx2")),
            (32, x86("GenuineIntel", 6, 0x3F, "Xeon E5", "fma avx2")),
            (32, x86("AuthenticAMD", 25, 17, "AMD EPYC", wide)),
            (64, x86("AuthenticAMD", 26, 2, "AMD EPYC 9755", wide)),
            (16, x86("AuthenticAMD", 23, 1, "AMD EPYC 7401", "fma avx2")),
            (32, "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd4f\n".into()),
            (16, "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\n".into()),
        ] {
            assert_eq!(per_cycle(&text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn units_that_nobody_knows_are_not_guessed() {
        for text in [
            // One unit or two: the name does not say.
            x86("GenuineIntel", 6, 0x55, "Intel(R) Xeon(R) CPU @ 2.00GHz", "fma avx2 avx512f"),
            x86("GenuineIntel", 6, 0x97, "12th Gen Intel(R) Core(TM) i9-12900K", "fma avx2"),
            x86("GenuineIntel", 6, 0x8F, "Xeon", "sse2"),
            x86("AuthenticAMD", 99, 1, "AMD of the future", "fma avx2"),
            "processor : 0\nCPU implementer : 0x61\nCPU part : 0x022\n".into(),
            String::new(),
        ] {
            let why = per_cycle(&text).unwrap_err();
            assert!(why.contains("are not known"), "{why}");
        }
    }

    #[test]
    fn hardware_threads_of_a_core_are_one_core() {
        let lists = |lists: &[&str]| lists.iter().map(|list| (*list).to_string()).collect::<Vec<_>>();
        assert_eq!(cores(&lists(&["0-1", "0-1", "2-3", "2-3"]), 4), 2);
        assert_eq!(cores(&lists(&["0", "1", "2", "3"]), 4), 4);
        assert_eq!(cores(&lists(&["0", "1", "2", "3"]), 2), 2, "a container may use two");
        assert_eq!(cores(&[], 8), 8);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_measured_clock_is_that_of_a_processor() {
        let gigahertz = measured_clock() / 1e9;
        // From below it is open: the machine may be busy, the build not optimised.
        assert!(gigahertz > 0.0 && gigahertz < 8.0, "{gigahertz}");
    }
}
