//! Tries decoders on many inputs, and says in a table what they did.

use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use super::mutation::plans;
use super::sys::peak_of;
use super::target::{Target, Verdict};

/// A decoder that takes longer for one input, of at most 16 KiB, than this does not get on.
const MAX_TIME: Duration = Duration::from_secs(10);

/// What a test program was asked for.
struct Arguments {
    /// Inputs for each decoder, instead of a number that follows from proptest's.
    inputs: Option<u32>,
    /// Parts of names of the decoders to try; none for all.
    filters: Vec<String>,
}

/// What one decoder did.
#[derive(Clone, Copy, Default)]
struct Row {
    inputs: u64,
    accepted: u64,
    bytes: u64,
    peak: usize,
    slowest: Duration,
    total: Duration,
}

/// The main function of a test program that tries `targets`: with `--inputs N` on N inputs each, otherwise on a few thousand each,
/// more or fewer as `PROPTEST_CASES` asks (256 unless set). A word on the command line selects decoders by name.
///
/// Each valid input must be accepted. What is then counted are inputs that differ from every valid one.
pub fn run(targets: &[Target]) -> ExitCode {
    let arguments = match Arguments::read(std::env::args().skip(1)) {
        Ok(Some(arguments)) => arguments,
        Ok(None) => return ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::FAILURE;
        }
    };
    println!(
        "{:<26} {:>9} {:>9} {:>9} {:>11} {:>10} {:>9} {:>11} {:>8}",
        "decoder", "inputs", "accepted", "rejected", "mean bytes", "peak bytes", "ns/input", "slowest us", "time s"
    );
    let mut failures = Vec::new();
    let mut sum = Row::default();
    for target in targets.iter().filter(|target| arguments.wants(target.name)) {
        print!("{:<26} ", target.name);
        let _ = std::io::stdout().flush();
        match attempt(target, arguments.inputs) {
            Ok(row) => {
                println!("{}", row.line());
                sum.add(&row);
            }
            Err(why) => {
                println!("FAILED");
                failures.push(format!("{}: {why}", target.name));
            }
        }
    }
    println!("{:<26} {}", "all", sum.line());
    if failures.is_empty() {
        return ExitCode::SUCCESS;
    }
    failures.iter().for_each(|failure| eprintln!("\n{failure}"));
    ExitCode::FAILURE
}

/// As [`run`] does it with one decoder, inside another test.
///
/// # Errors
/// What does not hold, and for which input.
pub fn check(target: &Target) -> Result<(), String> {
    attempt(target, None).map(drop)
}

fn attempt(target: &Target, inputs: Option<u32>) -> Result<Row, String> {
    let seeds = (target.seeds)();
    let row = Cell::new(Row::default());
    let one = |bytes: &[u8]| {
        let began = Instant::now();
        let (verdict, peak) = peak_of(|| (target.run)(bytes));
        let took = began.elapsed();
        let mut now = row.get();
        now.inputs += 1;
        now.accepted += u64::from(verdict == Verdict::Accepted);
        now.bytes += bytes.len() as u64;
        now.peak = now.peak.max(peak);
        now.slowest = now.slowest.max(took);
        now.total += took;
        row.set(now);
        let (fixed, factor) = target.memory;
        if peak > fixed + factor * bytes.len() {
            return Err(format!("{peak} B were allocated for {} B: more than {fixed} + {factor} a byte", bytes.len()));
        }
        if took > MAX_TIME {
            return Err(format!("{:.1} s went by for {} B", took.as_secs_f64(), bytes.len()));
        }
        Ok(verdict)
    };
    for (index, seed) in seeds.iter().enumerate() {
        // Panics are caught for proptest's inputs only.
        let verdict = catch_unwind(AssertUnwindSafe(|| one(seed)))
            .map_err(|_| format!("valid input number {index} panics: {}", literal(seed)))?;
        if verdict? == Verdict::Rejected {
            return Err(format!("valid input number {index} is rejected: {}", literal(seed)));
        }
    }
    row.set(Row::default());

    // Cases that proptest is asked for, times a factor.
    let asked = Config::default();
    let cases = inputs.unwrap_or_else(|| asked.cases.saturating_mul(target.inputs_per_case));
    let config = Config { cases, failure_persistence: None, ..asked };
    let result = TestRunner::new(config).run(&plans(), |plan| {
        let bytes = plan.bytes(&seeds);
        if seeds.contains(&bytes) {
            return Ok(());
        }
        one(&bytes).map(drop).map_err(TestCaseError::fail)
    });
    match result {
        Ok(()) if row.get().accepted == 0 && cases >= 1000 => {
            Err(format!("not one of {} changed inputs is accepted: nothing inside is tried", row.get().inputs))
        }
        Ok(()) => Ok(row.get()),
        Err(TestError::Abort(why)) => Err(why.to_string()),
        Err(TestError::Fail(why, plan)) => {
            Err(format!("{why}\nthe smallest input found: {}\nfrom {plan:?}", literal(&plan.bytes(&seeds))))
        }
    }
}

impl Arguments {
    /// `None` where there is nothing to do: `--list`, or `--ignored`.
    fn read(arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let mut read = Arguments { inputs: None, filters: Vec::new() };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--inputs" => {
                    let number = arguments.next().and_then(|number| number.parse().ok());
                    read.inputs = Some(number.ok_or("--inputs needs a number")?);
                }
                "--list" | "--ignored" => return Ok(None),
                // Of cargo's own test programs, with a value.
                "--test-threads" | "--color" | "--format" | "--skip" | "-Z" => drop(arguments.next()),
                flag if flag.starts_with('-') => {}
                word => read.filters.push(word.to_string()),
            }
        }
        Ok(Some(read))
    }

    fn wants(&self, name: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| name.contains(filter.as_str()))
    }
}

impl Row {
    fn line(&self) -> String {
        let inputs = self.inputs.max(1);
        format!(
            "{:>9} {:>9} {:>9} {:>11} {:>10} {:>9} {:>11} {:>8.2}",
            self.inputs,
            self.accepted,
            self.inputs - self.accepted,
            self.bytes / inputs,
            self.peak,
            self.total.as_nanos() / u128::from(inputs),
            self.slowest.as_micros(),
            self.total.as_secs_f64(),
        )
    }

    fn add(&mut self, other: &Row) {
        self.inputs += other.inputs;
        self.accepted += other.accepted;
        self.bytes += other.bytes;
        self.peak = self.peak.max(other.peak);
        self.slowest = self.slowest.max(other.slowest);
        self.total += other.total;
    }
}

/// `bytes` as source text, for a test of their own.
fn literal(bytes: &[u8]) -> String {
    format!("b\"{}\"", bytes.escape_ascii())
}
