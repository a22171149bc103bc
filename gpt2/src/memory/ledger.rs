//! What is counted: bytes by category, and the category of each thread.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Category {
    /// Parameters of the model, in any precision, and the tensors that hold them or stand for them.
    Parameters,
    /// Gradients, and what accumulates them.
    Gradients,
    /// State of the optimizer: moments, master copies of parameters.
    Optimizer,
    /// Outputs of layers that the backward pass needs, and what a computation allocates on its way.
    Activations,
    /// Buffers of collectives and transports. Threads that were never told otherwise are those of transports.
    Communication,
    /// All else: text, tokenizer, configuration.
    Other,
}

impl Category {
    /// Every category, in the order of declaration.
    pub const ALL: [Self; 6] =
        [Self::Parameters, Self::Gradients, Self::Optimizer, Self::Activations, Self::Communication, Self::Other];

    /// Its name as [`Usage`] is written, in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Communication => "communication",
            Self::Other => "other",
        }
    }

    /// The byte that stands for it in front of a block.
    pub(super) const fn code(self) -> u8 {
        self as u8
    }

    /// The category of [`Category::code`].
    pub(super) const fn of_code(code: u8) -> Self {
        match code {
            0 => Self::Parameters,
            1 => Self::Gradients,
            2 => Self::Optimizer,
            3 => Self::Activations,
            4 => Self::Communication,
            _ => Self::Other,
        }
    }
}

/// Bytes of one category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// Allocated now.
    pub current: u64,
    /// The most that was allocated at one time since the start of the process or the last [`reset_peaks`](super::reset_peaks).
    pub peak: u64,
}

/// Memory of this process by category. The counters are read one after another while other threads go on, so their sum may miss
/// `total` by what those threads do meanwhile; the peaks are of different moments, so their sum is no peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// [`Category::Parameters`].
    pub parameters: Bytes,
    /// [`Category::Gradients`].
    pub gradients: Bytes,
    /// [`Category::Optimizer`].
    pub optimizer: Bytes,
    /// [`Category::Activations`].
    pub activations: Bytes,
    /// [`Category::Communication`].
    pub communication: Bytes,
    /// [`Category::Other`].
    pub other: Bytes,
    /// All categories together; its peak is that of the sum.
    pub total: Bytes,
}

impl Usage {
    /// The same with each peak at least as high as in `earlier`.
    #[must_use]
    pub fn with_peaks_of(mut self, earlier: &Usage) -> Self {
        let pairs = [
            (&mut self.parameters, earlier.parameters),
            (&mut self.gradients, earlier.gradients),
            (&mut self.optimizer, earlier.optimizer),
            (&mut self.activations, earlier.activations),
            (&mut self.communication, earlier.communication),
            (&mut self.other, earlier.other),
            (&mut self.total, earlier.total),
        ];
        for (now, earlier) in pairs {
            now.peak = now.peak.max(earlier.peak);
        }
        self
    }

    /// The bytes of `category`.
    #[must_use]
    pub const fn of(&self, category: Category) -> Bytes {
        match category {
            Category::Parameters => self.parameters,
            Category::Gradients => self.gradients,
            Category::Optimizer => self.optimizer,
            Category::Activations => self.activations,
            Category::Communication => self.communication,
            Category::Other => self.other,
        }
    }
}

/// How often memory was asked for, since the start of the process; differences of two are what happened between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocations {
    /// Blocks. One that grows counts again, as one of its new length, since it may have been moved.
    pub count: u64,
    /// Their bytes, as asked for.
    pub bytes: u64,
    /// Of the blocks, those of [`LARGE`](Self::LARGE) bytes and more: the ones whose pages cost more than the search for a place.
    pub large: u64,
}

impl Allocations {
    /// Bytes of a large block.
    pub const LARGE: usize = 1 << 20;

    /// What was asked for after `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Allocations {
            count: self.count - earlier.count,
            bytes: self.bytes - earlier.bytes,
            large: self.large - earlier.large,
        }
    }
}

/// The category of what this thread allocates now.
pub(super) fn current() -> Category {
    THREAD.with(|thread| thread.scope.get().unwrap_or(thread.default.get()))
}

/// What [`recharge`](super::recharge) in this thread asks of the block that it is about to reallocate; taken once.
pub(super) fn take_moving() -> Option<Category> {
    THREAD.with(|thread| thread.moving.take())
}

/// The counters of this process. A global allocator is one for the whole process and reachable from nowhere else, and so are they.
pub(super) static LEDGER: Ledger = Ledger::new();

thread_local! {
    // A constant without a destructor: the allocator uses it, so it must not allocate, and must work while a thread ends.
    pub(super) static THREAD: Thread = const {
        Thread { scope: Cell::new(None), default: Cell::new(Category::Communication), moving: Cell::new(None) }
    };
}

pub(super) struct Thread {
    pub(super) scope: Cell<Option<Category>>,
    pub(super) default: Cell<Category>,
    pub(super) moving: Cell<Option<Category>>,
}

/// Bytes of every category and of all together.
pub(super) struct Ledger {
    categories: [Counter; Category::ALL.len()],
    total: Counter,
    requests: Requests,
}

impl Ledger {
    const fn new() -> Self {
        Self {
            categories: [const { Counter::new() }; Category::ALL.len()],
            total: Counter::new(),
            requests: Requests::new(),
        }
    }

    /// Counts a block of so many bytes that was asked for.
    pub(super) fn request(&self, bytes: usize) {
        self.requests.add(bytes);
    }

    pub(super) fn allocations(&self) -> Allocations {
        self.requests.read()
    }

    pub(super) fn charge(&self, category: Category, bytes: usize) {
        self.categories[category as usize].add(bytes);
        self.total.add(bytes);
    }

    pub(super) fn credit(&self, category: Category, bytes: usize) {
        self.categories[category as usize].subtract(bytes);
        self.total.subtract(bytes);
    }

    /// Moves bytes that are charged to `from`; the total stays.
    pub(super) fn transfer(&self, from: Category, to: Category, bytes: usize) {
        self.categories[to as usize].add(bytes);
        self.categories[from as usize].subtract(bytes);
    }

    pub(super) fn usage(&self) -> Usage {
        let of = |category: Category| self.categories[category as usize].bytes();
        Usage {
            parameters: of(Category::Parameters),
            gradients: of(Category::Gradients),
            optimizer: of(Category::Optimizer),
            activations: of(Category::Activations),
            communication: of(Category::Communication),
            other: of(Category::Other),
            total: self.total.bytes(),
        }
    }

    pub(super) fn reset_peaks(&self) {
        self.categories.iter().chain([&self.total]).for_each(Counter::reset_peak);
    }
}

/// What was asked for. Written together, so in one cache line.
#[repr(align(128))]
struct Requests {
    count: AtomicUsize,
    bytes: AtomicUsize,
    large: AtomicUsize,
}

impl Requests {
    const fn new() -> Self {
        Self { count: AtomicUsize::new(0), bytes: AtomicUsize::new(0), large: AtomicUsize::new(0) }
    }

    fn add(&self, bytes: usize) {
        self.count.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
        if bytes >= Allocations::LARGE {
            self.large.fetch_add(1, Relaxed);
        }
    }

    fn read(&self) -> Allocations {
        let of = |counter: &AtomicUsize| counter.load(Relaxed) as u64;
        Allocations { count: of(&self.count), bytes: of(&self.bytes), large: of(&self.large) }
    }
}

/// One sum, in a cache line of its own (two, since neighbours are fetched in pairs), so that categories do not slow each other down.
///
/// Relaxed suffices: a block is credited after it was charged in the order of this very counter, because whoever frees it got it from
/// whoever allocated it. So the sum never falls below zero.
#[repr(align(128))]
struct Counter {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Counter {
    const fn new() -> Self {
        Self { current: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    fn add(&self, bytes: usize) {
        let now = self.current.fetch_add(bytes, Relaxed).wrapping_add(bytes);
        // Reading is cheap while nobody writes; most allocations set no new peak.
        if now > self.peak.load(Relaxed) {
            self.peak.fetch_max(now, Relaxed);
        }
    }

    fn subtract(&self, bytes: usize) {
        self.current.fetch_sub(bytes, Relaxed);
    }

    fn bytes(&self) -> Bytes {
        let current = self.current.load(Relaxed) as u64;
        // Between the two steps of `add` the peak lags behind.
        Bytes { current, peak: current.max(self.peak.load(Relaxed) as u64) }
    }

    /// In this order, so that a block allocated after the call, or alive through it, always counts.
    fn reset_peak(&self) {
        self.peak.store(0, Relaxed);
        self.peak.fetch_max(self.current.load(Relaxed), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_knows_sums_and_peaks() {
        let ledger = Ledger::new();
        ledger.charge(Category::Parameters, 100);
        ledger.charge(Category::Gradients, 30);
        ledger.credit(Category::Parameters, 60);
        ledger.transfer(Category::Gradients, Category::Optimizer, 30);
        let usage = ledger.usage();
        assert_eq!(usage.parameters, Bytes { current: 40, peak: 100 });
        assert_eq!(usage.gradients, Bytes { current: 0, peak: 30 });
        assert_eq!(usage.optimizer, Bytes { current: 30, peak: 30 });
        assert_eq!(usage.total, Bytes { current: 70, peak: 130 });
        ledger.reset_peaks();
        assert_eq!(ledger.usage().parameters, Bytes { current: 40, peak: 40 });
        assert_eq!(ledger.usage().gradients, Bytes::default());
        assert_eq!(ledger.usage().total, Bytes { current: 70, peak: 70 });
    }

    #[test]
    fn blocks_that_are_asked_for_are_counted_and_large_ones_apart() {
        let ledger = Ledger::new();
        let before = ledger.allocations();
        for bytes in [8, Allocations::LARGE - 1, Allocations::LARGE] {
            ledger.request(bytes);
        }
        let bytes = 7 + 2 * Allocations::LARGE as u64;
        assert_eq!(ledger.allocations().since(before), Allocations { count: 3, bytes, large: 1 });
    }

    #[test]
    fn a_category_is_one_byte_and_one_name_everywhere() {
        let usage = serde_json::to_value(Usage::default()).unwrap();
        for category in Category::ALL {
            assert_eq!(Category::of_code(category.code()), category);
            assert_eq!(serde_json::to_value(category).unwrap(), category.name());
            assert!(usage.get(category.name()).is_some(), "{}", category.name());
        }
    }
}
