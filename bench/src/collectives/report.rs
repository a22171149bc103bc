//! Rows: as the table that nccl-tests prints, and as JSON.

use comm_core::Algorithm;
use isocomm::TransportOptions;
use rig::environment::Environment;
use rig::stats::{Ratio, median, percentile};
use serde::Serialize;

use super::case::{Case, Operation, ResultPlacement};

/// One case on one transport or peer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) transport: String,
    pub(crate) is_peer: bool,
    pub(crate) operation: Operation,
    /// In bytes, as nccl-tests counts them.
    pub(crate) size: usize,
    pub(crate) count: usize,
    #[serde(rename = "type")]
    pub(crate) dtype: String,
    pub(crate) redop: Option<String>,
    pub(crate) root: Option<usize>,
    pub(crate) ranks: usize,
    /// Of our transports: what was asked for, or the table's choice.
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) out_of_place: Outcome,
    pub(crate) in_place: Outcome,
    /// This transport's time divided by another's, round by round.
    pub(crate) ratios: Vec<Comparison>,
    pub(crate) transport_facts: Vec<(String, String)>,
    /// Settings of our transports; peers have none of them.
    pub(crate) options: Option<TransportOptions>,
    pub(crate) environment: Environment,
    /// What a connected TCP socket says it uses where nobody sets anything.
    pub(crate) tcp_congestion_in_use: String,
    /// The network namespace's, if there is one.
    pub(crate) namespace_congestion: Option<String>,
}

/// What one place of one row gave.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Outcome {
    Figures(Figures),
    /// Not measured, and why.
    Missing {
        missing: String,
        /// Whether it should have worked.
        failed: bool,
    },
}

/// Times and what follows from them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    /// Of one operation in microseconds: the slowest rank's mean of a round, the median over rounds.
    pub(crate) time_us: f64,
    pub(crate) min_us: f64,
    pub(crate) max_us: f64,
    pub(crate) rounds_us: Vec<f64>,
    /// Of single operations over all rounds, each on the rank where it took longest.
    pub(crate) p50_us: Option<f64>,
    pub(crate) p95_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    /// In GB/s: size by time, and that times the factor of the operation.
    pub(crate) algbw: f64,
    pub(crate) busbw: f64,
    /// Processor seconds of all ranks for each 10⁹ bytes of size.
    pub(crate) cpu_s_per_gb: f64,
    /// Elements that came out wrong, on all ranks together; `None` if nobody has looked.
    pub(crate) wrong: Option<u64>,
    pub(crate) iters: u64,
    pub(crate) warmup: u64,
}

/// How one time compares with another.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Comparison {
    /// With whom.
    pub(crate) with: String,
    pub(crate) place: ResultPlacement,
    /// Where the other's result goes, which may be elsewhere because it offers nothing else.
    pub(crate) place_there: ResultPlacement,
    #[serde(flatten)]
    pub(crate) ratio: Ratio,
}

/// What the rounds of one case gave on one target.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds {
    /// Mean time of one operation in each round, in microseconds.
    pub(crate) us: Vec<f64>,
    pub(crate) samples_ns: Vec<u64>,
    pub(crate) cpu_ns: u64,
    pub(crate) wrong: Option<u64>,
    pub(crate) iters: u64,
    pub(crate) warmup: u64,
}

impl Rounds {
    /// The figures of `case` on `ranks` ranks; `None` without a round.
    pub(crate) fn figures(&self, case: &Case, ranks: usize) -> Option<Figures> {
        let time_us = median(&self.us)?;
        let mut samples = self.samples_ns.clone();
        samples.sort_unstable();
        let percentile = |percent| percentile(&samples, percent).map(|ns| ns as f64 / 1e3);
        let algbw = case.bytes() as f64 / time_us / 1e3;
        let moved = case.bytes() as f64 * self.iters as f64 * self.us.len() as f64;
        Some(Figures {
            time_us,
            min_us: self.us.iter().copied().min_by(f64::total_cmp)?,
            max_us: self.us.iter().copied().max_by(f64::total_cmp)?,
            rounds_us: self.us.clone(),
            p50_us: percentile(50.0),
            p95_us: percentile(95.0),
            p99_us: percentile(99.0),
            algbw,
            busbw: algbw * case.operation.bus_factor(ranks),
            cpu_s_per_gb: self.cpu_ns as f64 / moved,
            wrong: self.wrong,
            iters: self.iters,
            warmup: self.warmup,
        })
    }
}

impl Outcome {
    pub(crate) fn figures(&self) -> Option<&Figures> {
        match self {
            Outcome::Figures(figures) => Some(figures),
            Outcome::Missing { .. } => None,
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        matches!(self, Outcome::Missing { failed: true, .. })
    }
}

impl Row {
    pub(crate) fn outcome(&self, place: ResultPlacement) -> &Outcome {
        match place {
            ResultPlacement::OutOfPlace => &self.out_of_place,
            ResultPlacement::InPlace => &self.in_place,
        }
    }

    /// Wrong elements, in place and out of place.
    pub(crate) fn wrong(&self) -> u64 {
        let wrong = |place| self.outcome(place).figures().and_then(|figures| figures.wrong).unwrap_or(0);
        ResultPlacement::BOTH.into_iter().map(wrong).sum()
    }
}

/// The table's two lines of titles.
pub(crate) fn header() -> String {
    let side = |title: &str| format!("{title:^44}");
    let names = format!("{:>10} {:>7} {:>7} {:>6} {:>10}", "time", "algbw", "busbw", "#wrong", "cpu");
    let units = format!("{:>10} {:>7} {:>7} {:>6} {:>10}", "(us)", "(GB/s)", "(GB/s)", "", "(s/GB)");
    let left = |cells: [&str; 6]| {
        let [transport, size, count, dtype, redop, root] = cells;
        format!("# {transport:<10} {size:>12} {count:>12} {dtype:>5} {redop:>6} {root:>4}")
    };
    [
        format!("{}  {}  {}", left([""; 6]), side("out-of-place"), side("in-place")),
        format!("{}  {names}  {names}", left(["transport", "size", "count", "type", "redop", "root"])),
        format!("{}  {units}  {units}", left(["", "(B)", "(elements)", "", "", ""])),
    ]
    .map(|line| line.trim_end().to_string())
    .join("\n")
}

/// A row of the table.
pub(crate) fn line(row: &Row) -> String {
    let side = |outcome: &Outcome| match outcome {
        Outcome::Figures(figures) => format!(
            "{:>10} {:>7} {:>7} {:>6} {:>10}",
            significant(figures.time_us),
            format!("{:.2}", figures.algbw),
            format!("{:.2}", figures.busbw),
            figures.wrong.map_or("N/A".into(), |wrong| wrong.to_string()),
            significant(figures.cpu_s_per_gb),
        ),
        Outcome::Missing { .. } => format!("{:>10} {:>7} {:>7} {:>6} {:>10}", "N/A", "N/A", "N/A", "N/A", "N/A"),
    };
    let text = format!(
        "  {:<10} {:>12} {:>12} {:>5} {:>6} {:>4}  {}  {}",
        row.transport,
        row.size,
        row.count,
        row.dtype,
        row.redop.as_deref().unwrap_or("none"),
        // As nccl-tests writes it.
        row.root.map_or("-1".into(), |root| root.to_string()),
        side(&row.out_of_place),
        side(&row.in_place)
    );
    let failure = ResultPlacement::BOTH.into_iter().find_map(|place| match row.outcome(place) {
        Outcome::Missing { missing, failed: true } => Some(missing),
        _ => None,
    });
    match failure {
        Some(why) => format!("{text}  {why}"),
        None => text,
    }
}

/// The comparisons of all rows, each with its own spread.
pub(crate) fn ratios(rows: &[Row]) -> Option<String> {
    let mut with: Vec<&str> = Vec::new();
    for comparison in rows.iter().flat_map(|row| &row.ratios) {
        if !with.contains(&comparison.with.as_str()) {
            with.push(&comparison.with);
        }
    }
    if with.is_empty() {
        return None;
    }
    let mut lines = vec![format!(
        "# {:<14} {:>12} {:>5} {:>6} {:<12}{}",
        "operation",
        "size (B)",
        "type",
        "redop",
        "transport",
        with.iter().map(|name| format!(" {:>24}", format!("/ {name}"))).collect::<String>()
    )];
    for row in rows.iter().filter(|row| !row.ratios.is_empty()) {
        let cells: String = with
            .iter()
            .map(|name| {
                let of = |place| row.ratios.iter().find(|ratio| ratio.with == *name && ratio.place == place);
                // What is written over its own input is what the transports here do best.
                let text = of(ResultPlacement::InPlace).or_else(|| of(ResultPlacement::OutOfPlace)).map_or(
                    "N/A".into(),
                    |comparison| {
                        let Ratio { median, min, max } = comparison.ratio;
                        format!("{median:.2} ({min:.2}-{max:.2})")
                    },
                );
                format!(" {text:>24}")
            })
            .collect();
        lines.push(format!(
            "  {:<14} {:>12} {:>5} {:>6} {:<12}{cells}",
            row.operation.name(),
            row.size,
            row.dtype,
            row.redop.as_deref().unwrap_or("none"),
            row.transport
        ));
    }
    Some(lines.join("\n"))
}

/// Rows of `--one-way`: throughput or round trip, what it costs, and how it compares.
pub(crate) fn one_way(rows: &[Row]) -> String {
    let mut lines = vec![format!(
        "# {:<10} {:>14} {:>14} {:>14} {:>24} {:>24}",
        "transport", "1 MiB (GB/s)", "cpu (s/GB)", "8 B trip (us)", "1 MiB time / tcp-raw", "trip / tcp-raw"
    )];
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.transport.as_str()) {
            names.push(&row.transport);
        }
    }
    for name in names {
        let of = |operation| rows.iter().find(|row| row.transport == name && row.operation == operation);
        let figures = |operation| of(operation).and_then(|row| row.in_place.figures());
        let ratio = |operation| {
            let ratio = of(operation).and_then(|row| row.ratios.iter().find(|ratio| ratio.with == "tcp-raw"));
            ratio.map_or("-".into(), |ratio| {
                let Ratio { median, min, max } = ratio.ratio;
                format!("{median:.2} ({min:.2}-{max:.2})")
            })
        };
        let number =
            |value: Option<f64>, digits: usize| value.map_or("N/A".into(), |value| format!("{value:.digits$}"));
        lines.push(format!(
            "  {name:<10} {:>14} {:>14} {:>14} {:>24} {:>24}",
            number(figures(Operation::OneWay).map(|figures| figures.algbw), 2),
            number(figures(Operation::OneWay).map(|figures| figures.cpu_s_per_gb), 2),
            number(figures(Operation::RoundTrip).map(|figures| figures.time_us), 1),
            ratio(Operation::OneWay),
            ratio(Operation::RoundTrip),
        ));
    }
    lines.join("\n")
}

/// A number with about four digits, whatever its size.
fn significant(value: f64) -> String {
    let digits = match value.abs() {
        large if large >= 1000.0 => 0,
        large if large >= 100.0 => 1,
        small if small >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use comm_core::DType;

    use super::*;
    use rig::samples::Reduction;

    fn row(transport: &str, us: &[f64]) -> Row {
        let case = Case::new(Operation::AllReduce, DType::F32, Some(Reduction::Sum), 0, 1_000_000, 4);
        let rounds = Rounds { us: us.to_vec(), cpu_ns: 3_000_000, wrong: Some(0), iters: 1, ..Rounds::default() };
        Row {
            transport: transport.into(),
            is_peer: false,
            operation: case.operation,
            size: case.bytes(),
            count: case.count,
            dtype: case.dtype.to_string(),
            redop: case.reduction.map(|reduction| reduction.to_string()),
            root: case.root,
            ranks: 4,
            algorithm: Some(Algorithm::Ring),
            out_of_place: Outcome::Missing { missing: "not here".into(), failed: false },
            in_place: Outcome::Figures(rounds.figures(&case, 4).unwrap()),
            ratios: Vec::new(),
            transport_facts: Vec::new(),
            options: None,
            environment: Environment::read(),
            tcp_congestion_in_use: "cubic".into(),
            namespace_congestion: None,
        }
    }

    #[test]
    fn columns_are_those_of_nccl_tests() {
        let row = row("tcp", &[400.0, 500.0, 900.0]);
        let cells: Vec<String> = line(&row).split_whitespace().map(String::from).collect();
        let missing = ["N/A"; 5];
        // 1 MB in 500 µs is 2 GB/s; on 4 ranks the bus carries 1.5 times that; 3 ms for 3 rounds of 1 MB are 1 s/GB.
        let expected =
            [&["tcp", "1000000", "250000", "f32", "sum", "-1"][..], &missing, &["500.0", "2.00", "3.00", "0", "1.00"]];
        assert_eq!(cells, expected.concat());
        let titles = header();
        let titles = titles.lines().nth(1).unwrap();
        for title in ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"] {
            assert!(titles.contains(title), "{titles}");
        }
        assert_eq!(line(&row).find("500.0").map(|at| at + 5), titles.rfind("time").map(|at| at + 4));
    }

    #[test]
    fn a_failure_is_said_in_its_row_and_in_json() {
        let mut row = row("tcp", &[1.0]);
        row.in_place = Outcome::Missing { missing: "rank 1 was lost".into(), failed: true };
        assert!(line(&row).ends_with("rank 1 was lost"));
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!(json["in_place"]["missing"], "rank 1 was lost");
        assert_eq!(json["type"], "f32");
    }

    #[test]
    fn ratios_have_their_spread() {
        let mut ours = row("tcp", &[2.0, 3.0, 4.0]);
        let ratio = Ratio::of(&[2.0, 3.0, 4.0], &[1.0, 1.0, 1.0]).unwrap();
        ours.ratios.push(Comparison {
            with: "gloo".into(),
            place: ResultPlacement::InPlace,
            place_there: ResultPlacement::InPlace,
            ratio,
        });
        let text = ratios(&[ours, row("gloo", &[1.0])]).unwrap();
        assert!(text.contains("/ gloo") && text.contains("3.00 (2.00-4.00)"), "{text}");
        assert_eq!(text.lines().count(), 2);
        assert_eq!(ratios(&[row("tcp", &[1.0])]), None);
    }
}
