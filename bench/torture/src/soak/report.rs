//! What a soak has come to so far.

use std::collections::BTreeMap;
use std::fmt::Write;

use isocomm::TransportKind;
use serde::Serialize;

use crate::ranks::fault::Fault;
use crate::ranks::protocol::{ResourceUsage, WorkReport};

/// What is known of one epoch.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Episode {
    pub(super) epoch: u64,
    pub(super) seconds: f64,
    pub(super) transport: Option<TransportKind>,
    pub(super) fault: Option<Fault>,
    pub(super) victim: Option<usize>,
    /// By survivor.
    pub(super) detection_ms: Vec<f64>,
    pub(super) said: Vec<String>,
    pub(super) complaints: Vec<String>,
    pub(super) work: WorkReport,
    /// After everything was dropped, by rank, where the rank lives.
    pub(super) holds: BTreeMap<usize, ResourceUsage>,
}

impl Episode {
    pub(super) fn add(&mut self, work: &WorkReport, rank: usize) {
        self.work.add(work);
        if work.wrong > 0 {
            self.complaints.push(format!("rank {rank} got {} WRONG ELEMENTS", work.wrong));
        }
    }
}

/// What all epochs have come to.
pub(crate) struct Report {
    ranks: usize,
    epochs: u64,
    work: WorkReport,
    /// By fault: how often, and the detection times in ms.
    faults: BTreeMap<Fault, (u64, Vec<f64>)>,
    restarts: u64,
    complaints: usize,
    hangs: usize,
    /// Of the rank that is never killed: seconds since the start, and what it held.
    watched: Vec<(f64, ResourceUsage)>,
}

impl Report {
    pub(crate) fn new(ranks: usize) -> Self {
        Report {
            ranks,
            epochs: 0,
            work: WorkReport::default(),
            faults: BTreeMap::new(),
            restarts: 0,
            complaints: 0,
            hangs: 0,
            watched: Vec::new(),
        }
    }

    pub(crate) fn survived(&mut self, fault: Fault, detection_ms: &[f64]) {
        let (count, times) = self.faults.entry(fault).or_default();
        *count += 1;
        times.extend_from_slice(detection_ms);
    }

    pub(crate) fn restarted(&mut self) {
        self.restarts += 1;
    }

    pub(crate) fn add(&mut self, episode: &Episode) {
        self.epochs += 1;
        self.work.add(&episode.work);
        self.complaints += episode.complaints.len();
        self.hangs += episode.complaints.iter().filter(|complaint| complaint.contains("HANGS")).count();
        if let Some(holds) = episode.holds.get(&(self.ranks - 1)) {
            self.watched.push((episode.seconds, *holds));
        }
    }

    pub(crate) fn complaints(&self) -> usize {
        self.complaints
    }

    pub(crate) fn is_well(&self) -> bool {
        self.complaints == 0 && self.work.wrong == 0
    }

    pub(crate) fn text(&self, title: &str) -> String {
        let mut text = format!(
            "--- {title}: {} epochs, {} restarts; {} operations, {} elements checked, {} wrong; {} hangs; {} complaints\n",
            self.epochs,
            self.restarts,
            self.work.total(),
            self.work.checked,
            self.work.wrong,
            self.hangs,
            self.complaints
        );
        let operations: Vec<String> =
            self.work.operations.iter().map(|(name, count)| format!("{name} {count}")).collect();
        let _ = writeln!(text, "operations: {}", operations.join(", "));
        for (fault, (count, times)) in &self.faults {
            let mut times = times.clone();
            times.sort_by(f64::total_cmp);
            let _ = match (times.get(times.len() / 2), times.last()) {
                (Some(median), Some(most)) => {
                    writeln!(
                        text,
                        "{fault:10} {count:>4} times, noticed after {median:.1} ms (median), {most:.1} ms at most"
                    )
                }
                _ => writeln!(text, "{fault:10} {count:>4} times, no rank noticed"),
            };
        }
        let _ = write!(text, "rank {}, which is never killed: {}", self.ranks - 1, self.growth());
        text
    }

    /// What the watched process held at the start, in the middle and at the end, and the slope of its memory.
    fn growth(&self) -> String {
        let Some((first, last)) = self.watched.first().zip(self.watched.last()) else {
            return "no epoch has ended yet".into();
        };
        let middle = self.watched[self.watched.len() / 2];
        let show = |(seconds, holds): &(f64, ResourceUsage)| {
            let mib = holds.resident as f64 / (1 << 20) as f64;
            format!("{mib:.1} MiB, {} descriptors, {} threads at {seconds:.0} s", holds.descriptors, holds.threads)
        };
        let later: Vec<(f64, f64)> = self.watched[self.watched.len() / 2..]
            .iter()
            .map(|(seconds, holds)| (*seconds, holds.resident as f64))
            .collect();
        let slope = slope(&later) * 60.0 / 1024.0;
        format!("{}; {}; {}; {slope:+.1} KiB a minute in the second half", show(first), show(&middle), show(last))
    }
}

/// Of the straight line with the least squares; 0 where there is none.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    if points.len() < 2 {
        return 0.0;
    }
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    if spread == 0.0 { 0.0 } else { points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>() / spread }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_lines() {
        assert_eq!(slope(&[]), 0.0);
        assert_eq!(slope(&[(1.0, 5.0)]), 0.0);
        assert_eq!(slope(&[(1.0, 5.0), (1.0, 6.0)]), 0.0);
        assert!((slope(&[(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_wrong_element_and_a_complaint_are_not_well() {
        let mut report = Report::new(3);
        assert!(report.is_well());
        let mut episode = Episode::default();
        episode.complaints.push("rank 1 HANGS".into());
        report.add(&episode);
        assert!(!report.is_well());
        report.survived(Fault::Kill, &[1.0, 3.0]);
        let text = report.text("end");
        assert!(text.contains("1 hangs") && text.contains("3.0 ms at most"), "{text}");
    }
}
