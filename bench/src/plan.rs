//! Plans: files that say which cells a sweep consists of.
//!
//! A plan names values for axes; its cells are their product, less what `exclude` takes out. What means nothing to a cell (congestion
//! control in shared memory, a link for a single rank) is set to one value, and cells that are then the same are one.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use comm_core::job::MAX_WORLD_SIZE;
use gpt2::cli::MAX_THREADS;
use gpt2::config::Preset;
use gpt2::precision::Precision;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use isocomm::Rung;
use rig::folder::read_small;
use rig::link::{Carrier, MAX_ENDS, Profile};
use rig::record::{Axis, Cell, DEFAULT, LOOPBACK, NOBODY, Planted};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};

/// A checked plan.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) name: String,
    /// What it is for, in a sentence.
    pub(crate) about: String,
    /// How often each cell runs.
    pub(crate) rounds: u32,
    /// The longest that one run may take.
    pub(crate) timeout: Duration,
    /// In the order of the plan.
    pub(crate) cells: Vec<Cell>,
}

/// The plans that come with this program.
pub(crate) const READY: [(&str, &str); 7] = [
    ("quick", include_str!("../plans/quick.toml")),
    ("links", include_str!("../plans/links.toml")),
    ("ladder", include_str!("../plans/ladder.toml")),
    ("scaling", include_str!("../plans/scaling.toml")),
    ("options", include_str!("../plans/options.toml")),
    ("control", include_str!("../plans/control.toml")),
    ("identity", include_str!("../plans/identity.toml")),
];

/// Most cells of a plan. A product of many axes is quickly larger than anyone means.
const MAX_CELLS: usize = 100_000;

/// Most values of one axis.
const MAX_VALUES: usize = 1000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    name: String,
    #[serde(default)]
    about: String,
    rounds: u32,
    #[serde(default = "two_minutes")]
    timeout_s: u64,
    axes: Axes,
    #[serde(default)]
    exclude: Vec<Exclusion>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Axes {
    strategy: Values<String>,
    transport: Values<String>,
    link: Values<String>,
    ranks: Values<usize>,
    precision: Values<String>,
    wire: Values<String>,
    bucket: Values<Size>,
    overlap: Values<bool>,
    lanes: Values<usize>,
    congestion: Values<String>,
    quic_mtu: Values<Mtu>,
    seed: Values<u64>,
    preset: Values<String>,
    batch: Values<usize>,
    accumulation: Values<usize>,
    recompute: Values<bool>,
    steps: Values<u64>,
    threads: Values<usize>,
    planted: Values<Delay>,
    variant: Values<String>,
}

impl Default for Axes {
    fn default() -> Self {
        let one = |text: &str| Values(vec![text.to_string()]);
        Axes {
            strategy: one("ddp"),
            transport: one("tcp"),
            link: one(LOOPBACK),
            ranks: Values(vec![2]),
            precision: one("f32"),
            wire: one("f32"),
            bucket: Values(vec![Size(StrategyOptions::default().bucket_bytes)]),
            overlap: Values(vec![true]),
            lanes: Values(vec![2]),
            congestion: one(DEFAULT),
            quic_mtu: Values(vec![Mtu(None)]),
            seed: Values(vec![1337]),
            preset: one("tiny"),
            batch: Values(vec![12]),
            accumulation: Values(vec![1]),
            recompute: Values(vec![false]),
            steps: Values(vec![20]),
            threads: Values(vec![1]),
            planted: Values(vec![Delay(None)]),
            variant: one(""),
        }
    }
}

/// The values of an axis: one, or a list.
#[derive(Debug)]
struct Values<T>(Vec<T>);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Values<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let values = match toml::Value::deserialize(deserializer)? {
            toml::Value::Array(values) => values,
            one => vec![one],
        };
        let values: Result<Vec<T>, _> = values.into_iter().map(T::deserialize).collect();
        // The place is added by whoever reads the file.
        values.map(Values).map_err(|error| D::Error::custom(error.to_string().trim_end()))
    }
}

/// Bytes: a number, or one with a unit.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "Written")]
struct Size(usize);

#[derive(Deserialize)]
#[serde(untagged, expecting = "a number or a text")]
enum Written {
    Number(u64),
    Text(String),
}

impl TryFrom<Written> for Size {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let bytes = match written {
            Written::Number(bytes) => Some(bytes),
            Written::Text(text) => {
                let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
                let (digits, shift) = units
                    .iter()
                    .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
                    .unwrap_or((text.as_str(), 0));
                digits.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift))
            }
        };
        match bytes.and_then(|bytes| usize::try_from(bytes).ok()).filter(|bytes| *bytes > 0) {
            Some(bytes) => Ok(Size(bytes)),
            None => Err("a size is a number of bytes above 0, like 65536, \"64KiB\" or \"25MiB\"".into()),
        }
    }
}

/// QUIC's largest datagram: a number of bytes, or `default`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "Written")]
struct Mtu(Option<u16>);

impl TryFrom<Written> for Mtu {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Text(text) if text == DEFAULT => Ok(Mtu(None)),
            Written::Number(bytes @ 1200..=65_507) => Ok(Mtu(u16::try_from(bytes).ok())),
            _ => Err("quic-mtu is a UDP payload of 1200 to 65507 bytes, or \"default\"".into()),
        }
    }
}

/// A delay to be planted, or `none`.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "WrittenDelay")]
struct Delay(Option<Planted>);

#[derive(Deserialize)]
#[serde(untagged, expecting = "\"none\" or { ms = 5, rank = 1 }")]
enum WrittenDelay {
    Text(String),
    Delay(DelayTable),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DelayTable {
    ms: f64,
    rank: Option<usize>,
}

impl TryFrom<WrittenDelay> for Delay {
    type Error = String;

    fn try_from(written: WrittenDelay) -> Result<Self, String> {
        match written {
            WrittenDelay::Text(text) if text == "none" => Ok(Delay(None)),
            WrittenDelay::Text(text) => Err(format!("`{text}` is no delay; write \"none\" or {{ ms = 5, rank = 1 }}")),
            WrittenDelay::Delay(DelayTable { ms, rank }) if ms > 0.0 && ms <= 60_000.0 => {
                Ok(Delay(Some(Planted { microseconds: (ms * 1e3).round() as u64, rank })))
            }
            WrittenDelay::Delay(DelayTable { ms, .. }) => {
                Err(format!("a planted delay of {ms} ms must lie above 0 and up to 60000"))
            }
        }
    }
}

/// What is left out: cells with these values, of all axes that are named.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
struct Exclusion(std::collections::BTreeMap<Axis, Values<toml::Value>>);

impl Exclusion {
    fn takes(&self, cell: &Cell) -> bool {
        self.0.iter().all(|(axis, values)| values.0.iter().any(|value| written(value) == cell.value(*axis)))
    }
}

/// A value as [`Cell::value`] writes it.
fn written(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Boolean(on) => if *on { "on" } else { "off" }.into(),
        other => other.to_string(),
    }
}

fn two_minutes() -> u64 {
    120
}

impl Plan {
    /// The plan in a file, or a ready one by its name.
    ///
    /// # Errors
    /// What is wrong with it and where, for the user.
    pub(crate) fn load(path: &Path) -> Result<(Plan, String), String> {
        let ready = READY.iter().find(|(name, _)| path.as_os_str() == *name).map(|(_, text)| (*text).to_string());
        let text = match ready {
            Some(text) => text,
            None => read_small(path).map_err(|why| {
                let names = READY.map(|(name, _)| name).join(", ");
                format!("{why}; give a plan's file, or the name of a ready one: {names}")
            })?,
        };
        let plan = Plan::parse(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok((plan, text))
    }

    /// # Errors
    /// What is wrong with it and where, for the user.
    pub(crate) fn parse(text: &str) -> Result<Plan, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_string())?;
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !file.name.chars().all(is_name) || file.name.starts_with('.') || file.about.chars().any(char::is_control) {
            return Err("name: a plan's name has letters, digits, `-`, `_` and `.`; `about` is one line".into());
        }
        if file.name.is_empty() || file.rounds == 0 || file.timeout_s == 0 {
            return Err("a plan has a name, at least 1 round, and a timeout-s of at least 1".into());
        }
        let cells = file.axes.cells()?;
        let wanted: Vec<Cell> =
            cells.into_iter().filter(|cell| !file.exclude.iter().any(|exclusion| exclusion.takes(cell))).collect();
        // The same cell may come from several values that mean nothing to it.
        let mut seen = BTreeSet::new();
        let cells: Vec<Cell> = wanted.into_iter().filter(|cell| seen.insert(cell.clone())).collect();
        if cells.is_empty() {
            return Err("nothing is left of the plan: `exclude` takes out every cell".into());
        }
        Ok(Plan {
            name: file.name,
            about: file.about,
            rounds: file.rounds,
            timeout: Duration::from_secs(file.timeout_s),
            cells,
        })
    }
}

impl Axes {
    /// The product of all axes.
    fn cells(&self) -> Result<Vec<Cell>, String> {
        let first = Cell {
            strategy: String::new(),
            transport: String::new(),
            link: String::new(),
            ranks: 0,
            precision: String::new(),
            wire: String::new(),
            bucket_bytes: 0,
            overlap: true,
            lanes: 0,
            congestion: String::new(),
            quic_mtu: None,
            seed: 0,
            preset: String::new(),
            batch: 0,
            accumulation: 0,
            recompute: false,
            steps: 0,
            threads: 0,
            planted: None,
            variant: String::new(),
        };
        let mut cells = vec![first];
        multiply(&mut cells, Axis::Preset, &self.preset, |cell, value| cell.preset.clone_from(value))?;
        multiply(&mut cells, Axis::Link, &self.link, |cell, value| cell.link.clone_from(value))?;
        multiply(&mut cells, Axis::Ranks, &self.ranks, |cell, value| cell.ranks = *value)?;
        multiply(&mut cells, Axis::Transport, &self.transport, |cell, value| cell.transport.clone_from(value))?;
        multiply(&mut cells, Axis::Strategy, &self.strategy, |cell, value| cell.strategy.clone_from(value))?;
        multiply(&mut cells, Axis::Precision, &self.precision, |cell, value| cell.precision.clone_from(value))?;
        multiply(&mut cells, Axis::Wire, &self.wire, |cell, value| cell.wire.clone_from(value))?;
        multiply(&mut cells, Axis::Bucket, &self.bucket, |cell, value| cell.bucket_bytes = value.0)?;
        multiply(&mut cells, Axis::Overlap, &self.overlap, |cell, value| cell.overlap = *value)?;
        multiply(&mut cells, Axis::Lanes, &self.lanes, |cell, value| cell.lanes = *value)?;
        multiply(&mut cells, Axis::Congestion, &self.congestion, |cell, value| cell.congestion.clone_from(value))?;
        multiply(&mut cells, Axis::QuicMtu, &self.quic_mtu, |cell, value| cell.quic_mtu = value.0)?;
        multiply(&mut cells, Axis::Seed, &self.seed, |cell, value| cell.seed = *value)?;
        multiply(&mut cells, Axis::Batch, &self.batch, |cell, value| cell.batch = *value)?;
        multiply(&mut cells, Axis::Accumulation, &self.accumulation, |cell, value| cell.accumulation = *value)?;
        multiply(&mut cells, Axis::Recompute, &self.recompute, |cell, value| cell.recompute = *value)?;
        multiply(&mut cells, Axis::Steps, &self.steps, |cell, value| cell.steps = *value)?;
        multiply(&mut cells, Axis::Threads, &self.threads, |cell, value| cell.threads = *value)?;
        multiply(&mut cells, Axis::Planted, &self.planted, |cell, value| cell.planted.clone_from(&value.0))?;
        multiply(&mut cells, Axis::Variant, &self.variant, |cell, value| cell.variant.clone_from(value))?;
        cells.into_iter().map(checked).collect()
    }
}

/// Each cell once with each value.
fn multiply<T>(
    cells: &mut Vec<Cell>,
    axis: Axis,
    values: &Values<T>,
    set: impl Fn(&mut Cell, &T),
) -> Result<(), String> {
    let Values(values) = values;
    if values.is_empty() || values.len() > MAX_VALUES || cells.len() * values.len() > MAX_CELLS {
        return Err(format!(
            "axis {axis} has {} values: an axis has 1 to {MAX_VALUES}, and a plan at most {MAX_CELLS} cells; split the plan",
            values.len()
        ));
    }
    *cells = std::mem::take(cells)
        .into_iter()
        .flat_map(|cell| {
            let set = &set;
            values.iter().map(move |value| {
                let mut cell = cell.clone();
                set(&mut cell, value);
                cell
            })
        })
        .collect();
    Ok(())
}

/// The cell, if all its values mean something, with those that mean nothing to it set to what they are by default.
fn checked(mut cell: Cell) -> Result<Cell, String> {
    let of = |axis: Axis| move |why: String| format!("axis {axis}: {why}");
    let strategy = cell.strategy.parse::<StrategyKind>().map_err(String::from).map_err(of(Axis::Strategy))?;
    let alone = strategy == StrategyKind::Single;
    if alone {
        (cell.ranks, cell.transport) = (1, NOBODY.into());
    } else {
        let rung: Rung = cell.transport.parse().map_err(of(Axis::Transport))?;
        cell.transport = rung.to_string();
    }
    let profile = Profile::find(&cell.link).map_err(of(Axis::Link))?;
    cell.precision.parse::<Precision>().map_err(String::from).map_err(of(Axis::Precision))?;
    cell.wire.parse::<Precision>().map_err(String::from).map_err(of(Axis::Wire))?;
    let _: Preset = cell.preset.parse().map_err(|why| of(Axis::Preset)(format!("{why}")))?;
    let positive = [
        (Axis::Ranks, cell.ranks, MAX_WORLD_SIZE),
        (Axis::Lanes, cell.lanes, 64),
        (Axis::Batch, cell.batch, 1 << 20),
        (Axis::Accumulation, cell.accumulation, 1 << 20),
        (Axis::Steps, usize::try_from(cell.steps).unwrap_or(usize::MAX), 1_000_000),
        (Axis::Threads, cell.threads, MAX_THREADS),
    ];
    if let Some((axis, value, most)) = positive.into_iter().find(|(_, value, most)| *value == 0 || value > most) {
        return Err(format!("axis {axis}: {value} must lie between 1 and {most}"));
    }
    if !alone && cell.ranks < 2 {
        return Err(format!(
            "axis ranks: {} needs at least 2 ranks; one rank alone is the strategy `single`",
            cell.strategy
        ));
    }
    if !cell.batch.is_multiple_of(cell.ranks * cell.accumulation) {
        return Err(format!(
            "axis batch: {} sequences cannot be divided evenly among {} ranks and {} micro-steps",
            cell.batch, cell.ranks, cell.accumulation
        ));
    }
    if let Some(rank) = cell.planted.as_ref().and_then(|planted| planted.rank).filter(|rank| *rank >= cell.ranks) {
        return Err(format!("axis planted: there is no rank {rank} of {}", cell.ranks));
    }
    check_congestion(&cell.congestion)?;
    if cell.variant.chars().any(char::is_control) {
        return Err("axis variant: a variant is a name without control characters".into());
    }
    let ends = cell.ranks.div_ceil(cell.ranks_per_end());
    if profile.carrier != Carrier::None && ends > MAX_ENDS {
        return Err(format!("axis ranks: the link {} has at most {MAX_ENDS} ends, not {ends}", cell.link));
    }
    if let Some(last) = profile.unusual.keys().max().filter(|last| profile.carrier != Carrier::None && **last >= ends) {
        return Err(format!(
            "axis ranks: the link {} describes the end of rank {last}, and there are {ends}",
            cell.link
        ));
    }
    let rung = cell.transport.parse::<Rung>().ok();
    if alone || rung.is_some_and(Rung::is_in_memory) {
        (cell.link, cell.congestion) = (LOOPBACK.into(), DEFAULT.into());
    }
    if !rung.is_some_and(Rung::has_packets) {
        cell.quic_mtu = None;
    }
    if alone {
        let wire = cell.precision.clone();
        (cell.wire, cell.lanes) = (wire, 2);
    }
    let in_buckets =
        matches!(strategy, StrategyKind::Ddp | StrategyKind::Zero1 | StrategyKind::Zero2 | StrategyKind::Hierarchical);
    if !in_buckets {
        cell.bucket_bytes = StrategyOptions::default().bucket_bytes;
    }
    if !in_buckets && strategy != StrategyKind::Fsdp {
        cell.overlap = true;
    }
    Ok(cell)
}

/// Whether there is such a congestion control for TCP and QUIC alike.
fn check_congestion(name: &str) -> Result<(), String> {
    const KNOWN: [&str; 4] = [DEFAULT, "cubic", "bbr", "reno"];
    if KNOWN.contains(&name) {
        return Ok(());
    }
    Err(format!("axis congestion: `{name}` is none that TCP and QUIC both have; choose one of {}", KNOWN.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(axes: &str) -> Result<Plan, String> {
        Plan::parse(&format!("name = \"x\"\nrounds = 3\n[axes]\n{axes}\n"))
    }

    #[test]
    fn cells_are_the_product_of_the_axes() {
        let plan = plan("strategy = [\"ddp\", \"fsdp\"]\ntransport = [\"tcp\", \"quic\"]\nranks = [2, 4]").unwrap();
        assert_eq!((plan.cells.len(), plan.rounds), (8, 3));
        let labels: Vec<String> = plan.cells.iter().map(|cell| cell.label(&Cell::varied(plan.cells.iter()))).collect();
        assert_eq!(labels[0], "ddp tcp ranks 2");
        assert!(labels.contains(&"fsdp quic ranks 4".to_string()));
    }

    #[test]
    fn what_means_nothing_to_a_cell_makes_no_cells() {
        let axes = "strategy = [\"single\", \"ps\"]\ntransport = [\"shm\", \"tcp\", \"quic\"]\nlink = [\"loopback\", \"wan\"]\n\
                    congestion = [\"cubic\", \"bbr\"]\noverlap = [true, false]\nquic-mtu = [\"default\", 1452]";
        let cells = plan(axes).unwrap().cells;
        let count = |strategy: &str, transport: &str| {
            cells.iter().filter(|cell| cell.strategy == strategy && cell.transport == transport).count()
        };
        assert_eq!((count("single", NOBODY), count("ps", "shm")), (1, 1));
        assert_eq!((count("ps", "tcp"), count("ps", "quic")), (4, 8));
    }

    #[test]
    fn exclusions_take_out_what_fits_them() {
        let axes = "strategy = [\"ddp\", \"ring\"]\nranks = [2, 4]\nbatch = 8\n[[exclude]]\nstrategy = \"ring\"\nranks = [4, 8]";
        let cells = plan(axes).unwrap().cells;
        assert_eq!(cells.len(), 3);
        assert!(!cells.iter().any(|cell| cell.strategy == "ring" && cell.ranks == 4));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let cases = [
            ("strategy = \"telepathy\"", "telepathy"),
            ("transport = \"pigeon\"", "pigeon"),
            ("stratgy = \"ddp\"", "stratgy"),
            ("link = \"moon\"", "moon"),
            ("link = \"wan\"\nranks = 256\nbatch = 256", "at most 200 ends"),
            ("variant = \"a\\u0000\"", "axis variant"),
            ("ranks = 0", "axis ranks"),
            ("ranks = 1", "at least 2 ranks"),
            ("ranks = \"two\"", "two"),
            ("batch = 3", "axis batch"),
            ("bucket = \"big\"", "64KiB"),
            ("bucket = 0", "above 0"),
            ("quic-mtu = 3", "1200"),
            ("congestion = \"vegas\"", "vegas"),
            ("planted = { ms = -1 }", "planted delay"),
            ("planted = { ms = 5, rank = 7 }", "no rank 7"),
            ("steps = []", "axis steps"),
            ("wire = \"f64\"", "axis wire"),
            ("strategy = \"ddp\"\n[[exclude]]\nstrategy = \"ddp\"", "nothing is left"),
            ("strategy = \"ddp\"\n[[exclude]]\nstrtegy = \"ddp\"", "strtegy"),
        ];
        for (axes, expected) in cases {
            let why = plan(axes).unwrap_err();
            assert!(why.contains(expected), "{axes}: {why}");
        }
        assert!(Plan::parse("").unwrap_err().contains("name"));
        assert!(Plan::parse("name = \"../x\"\nrounds = 1\n[axes]").unwrap_err().contains("name"));
        assert!(Plan::load(Path::new("/nowhere.toml")).unwrap_err().contains("/nowhere.toml"));
    }

    #[test]
    fn ready_plans_are_right() {
        for (name, text) in READY {
            let plan = Plan::parse(text).unwrap_or_else(|why| panic!("{name}: {why}"));
            assert!(plan.name == name && !plan.about.is_empty() && !plan.cells.is_empty(), "{name}");
        }
    }

    #[test]
    fn sizes_have_units() {
        let plan = plan("bucket = [65536, \"64KiB\", \"25MiB\"]").unwrap();
        let sizes: Vec<usize> = plan.cells.iter().map(|cell| cell.bucket_bytes).collect();
        assert_eq!(sizes, [65_536, 25 << 20]);
    }
}
