//! The poller's work for timelines after the calls that ended them: it checks repeatedly whether signals have arrived, and
//! poisons again the words that a terminated peer's device may still write. It also polls the conditions that descriptors wait
//! for.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Endpoint, OwnCounter, Side, Termination, Timeline, WordPage, return_own_slot};
use crate::os::{Timers, clock};
use crate::sharing::Watch;
use crate::transport::Worker;

/// Pause before the words of a terminated peer are poisoned again, in case a signal that it had submitted has arrived since, and
/// the number of times, with pauses that double: for two minutes. The driver takes down a killed process's queues within seconds.
const POISON_AGAIN: Duration = Duration::from_millis(2);
const POISON_TIMES: u32 = 16;

/// The number of times for words that no timeline refers to any longer, though a stream may still wait for them: for half a
/// second.
const POISON_UNUSED_TIMES: u32 = 8;

/// Maximum number of timelines and pages whose words are poisoned repeatedly.
const MAX_POISONED: usize = 1024;

/// Interval between two looks at whether signals within this process have arrived.
const ARRIVAL: Duration = Duration::from_millis(1);

/// Words that are poisoned repeatedly for a while, as device work that a peer had submitted may still overwrite them.
#[derive(Debug)]
pub(crate) enum Poison {
    /// The words of a timeline whose peer is still alive.
    Timeline(Arc<Endpoint>),
    /// All counters of a page of a terminated peer that this side waits for.
    Page(Arc<WordPage>, Side),
}

/// A timeline whose own counter is ended once `least` has been signalled and has arrived, as `order` counts it.
pub(crate) struct Finish {
    pub(crate) timeline: Timeline,
    pub(crate) least: u64,
    pub(crate) order: Option<Arc<OwnCounter>>,
}

/// A command of another thread.
pub(crate) enum FollowUp {
    /// Poisons words again, for a while.
    Poison(Poison),
    /// Ends both sides of a timeline within this process, once the signals of the near side have arrived.
    EndOnceArrived(Timeline, Option<Timeline>),
    /// Ends this side's counter for good, once its signals have arrived.
    FinishOnceArrived(Finish),
    /// Keeps a value until the signals that were submitted in this order have arrived.
    KeepUntilArrived(Arc<OwnCounter>, Arc<dyn Any + Send + Sync>),
    /// Makes a descriptor readable once a condition is true.
    Watch(Watch),
}

/// Something that waits for signals to arrive.
enum PendingArrival {
    End(Timeline, Option<Timeline>),
    Finish(Finish),
    Keep(Arc<OwnCounter>, #[allow(dead_code, reason = "kept, and dropped")] Arc<dyn Any + Send + Sync>),
    Watch(Watch),
}

/// A step of a follow-up, by its number.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Poisons words for the nth time.
    Poison { id: u64, times: u32 },
    /// Checks whether signals have arrived.
    Arrival { id: u64 },
}

/// The commands that are in progress. Everything that may hold the last reference to a backend is dropped on the worker.
pub(crate) struct FollowUps {
    worker: Worker,
    timers: Timers<Step>,
    /// Poisoned words, the oldest first: signals that the peer had submitted to its device may still arrive.
    poisoned: BTreeMap<u64, Poison>,
    arrivals: HashMap<u64, PendingArrival>,
    last: u64,
}

impl FollowUps {
    pub(crate) fn new(worker: Worker) -> Self {
        Self {
            worker,
            timers: Timers::default(),
            poisoned: BTreeMap::new(),
            arrivals: HashMap::new(),
            last: 0,
        }
    }

    /// Begins a follow-up.
    pub(crate) fn begin(&mut self, follow_up: FollowUp) {
        let arrival = match follow_up {
            FollowUp::Poison(words) => return self.begin_poison(words),
            FollowUp::EndOnceArrived(near, far) => PendingArrival::End(near, far),
            FollowUp::FinishOnceArrived(finish) => PendingArrival::Finish(finish),
            FollowUp::KeepUntilArrived(order, kept) => PendingArrival::Keep(order, kept),
            FollowUp::Watch(watch) => PendingArrival::Watch(watch),
        };
        self.last += 1;
        self.arrivals.insert(self.last, arrival);
        self.look_for_arrival(clock::now(), self.last);
    }

    /// Returns the time at which [`run`](Self::run) has something to do.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Runs everything that is due.
    pub(crate) fn run(&mut self, now: Instant) {
        while let Some(step) = self.timers.take_due(now) {
            match step {
                Step::Poison { id, times } => self.poison_again(now, id, times),
                Step::Arrival { id } => self.look_for_arrival(now, id),
            }
        }
    }

    fn look_for_arrival(&mut self, now: Instant, id: u64) {
        let Some(arrival) = self.arrivals.get(&id) else { return };
        if !arrival.is_over() {
            self.timers.insert(now + arrival.interval(now), Step::Arrival { id });
            return;
        }
        match self.arrivals.remove(&id) {
            Some(PendingArrival::End(near, far)) => {
                near.endpoint().end(Termination::Released);
                if let Some(far) = far {
                    far.endpoint().end(Termination::Released);
                    return_own_slot(&far, &near);
                }
            }
            Some(over) => self.drop_elsewhere(over),
            None => {}
        }
    }

    fn begin_poison(&mut self, words: Poison) {
        // The oldest has been poisoned most often.
        if self.poisoned.len() >= MAX_POISONED
            && let Some((_, oldest)) = self.poisoned.pop_first()
        {
            self.drop_elsewhere(oldest);
        }
        self.last += 1;
        self.poisoned.insert(self.last, words);
        self.poison_after_pause(clock::now(), self.last, 0);
    }

    /// The pause doubles each time.
    fn poison_after_pause(&mut self, now: Instant, id: u64, times: u32) {
        self.timers.insert(now + POISON_AGAIN * (1 << times), Step::Poison { id, times: times + 1 });
    }

    fn poison_again(&mut self, now: Instant, id: u64, times: u32) {
        let goes_on = match self.poisoned.get(&id) {
            None => return,
            Some(Poison::Timeline(endpoint)) => {
                endpoint.poison();
                let is_used = times < POISON_UNUSED_TIMES || Arc::strong_count(endpoint) > 1;
                is_used && endpoint.needs_poison() && !endpoint.is_sealed()
            }
            Some(Poison::Page(page, side)) => {
                page.poison(*side);
                times < POISON_UNUSED_TIMES || Arc::strong_count(page) > 1
            }
        };
        if times < POISON_TIMES && goes_on {
            self.poison_after_pause(now, id, times);
        } else if let Some(words) = self.poisoned.remove(&id) {
            self.drop_elsewhere(words);
        }
    }

    fn drop_elsewhere(&self, value: impl Send + 'static) {
        self.worker.submit(move || drop(value));
    }
}

impl PendingArrival {
    /// Returns whether there is nothing left to wait for.
    fn is_over(&self) -> bool {
        match self {
            Self::End(near, _) => near.has_arrived(),
            Self::Finish(Finish { timeline, least, order }) => {
                timeline.finish_if_arrived(*least, order.as_deref())
            }
            Self::Keep(order, _) => order.has_arrived(),
            Self::Watch(watch) => watch.is_over(),
        }
    }

    /// Returns the time until the next look.
    fn interval(&self, now: Instant) -> Duration {
        match self {
            Self::Watch(watch) => watch.interval(now),
            Self::End(..) | Self::Finish(_) | Self::Keep(..) => ARRIVAL,
        }
    }
}

#[cfg(test)]
mod tests;
