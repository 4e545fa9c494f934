//! When a receiver spins before it sleeps: to be woken by the kernel takes longer than a hand-over.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long a receiver looks again and again before it sleeps, where nothing else is said.
pub(crate) const SPIN: Duration = Duration::from_micros(50);

/// The most waits that pass before it spins again.
const MOST_NEEDED: u32 = 256;

/// So many messages that were spun for pay for spinning in vain once: each saves some microseconds.
const PAYS: u32 = 16;

/// A look takes a fraction of this, unless somebody else had the processor meanwhile.
const OWN_PROCESSOR: Duration = Duration::from_micros(3);

/// How messages have been coming. A receiver spins as long as they come while it does. Where that was in vain, as the sender is
/// silent or has no processor to run on, it sleeps the next time, and then twice as often, and so on; unless spinning has paid
/// before, as with messages that come in bursts. How long it slept says nothing: that may be what the waking took.
#[derive(Debug)]
pub(crate) struct Pace {
    /// How long it spins.
    limit: Duration,
    /// Is there a processor for the sender meanwhile?
    possible: bool,
    /// Waits since it last spun in vain, and how many there have to be.
    since: u32,
    needed: u32,
    /// Messages that were spun for since then.
    paid: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self::within(SPIN)
    }
}

impl Pace {
    /// Of a receiver that spins so long.
    pub(crate) fn within(limit: Duration) -> Self {
        Self { limit, possible: several_processors(), since: 0, needed: 1, paid: 0 }
    }

    /// Waits until a look finds something: again and again where that is worth while, though not beyond `until`, and then
    /// asleep.
    pub(crate) fn wait<T, E>(
        &mut self,
        until: Option<Instant>,
        look: impl FnMut(Look) -> Result<Option<T>, E>,
    ) -> Result<T, E> {
        let spins = self.spins();
        self.wait_so(spins, until, look)
    }

    fn wait_so<T, E>(
        &mut self,
        spins: bool,
        until: Option<Instant>,
        mut look: impl FnMut(Look) -> Result<Option<T>, E>,
    ) -> Result<T, E> {
        let begin = Instant::now();
        let end = until.map_or(begin + self.limit, |until| until.min(begin + self.limit));
        let (mut last, mut in_vain) = (begin, false);
        while spins && last < end {
            let found = look(Look::Now)?;
            let now = Instant::now();
            if let Some(found) = found {
                self.found(now - last, in_vain);
                return Ok(found);
            }
            (last, in_vain) = (now, true);
        }
        if spins {
            self.spun(false);
        } else {
            self.slept();
        }
        loop {
            if let Some(found) = look(Look::Asleep)? {
                return Ok(found);
            }
        }
    }

    /// Notes what a look found that took so long, and whether others were in vain before: else it was there already. Where the look
    /// took long the sender had the processor, which it would have had at once while this end slept.
    fn found(&mut self, look: Duration, in_vain: bool) {
        if in_vain {
            self.spun(look < OWN_PROCESSOR);
        } else {
            self.slept();
        }
    }

    /// Is it worth while to spin now?
    pub(crate) fn spins(&self) -> bool {
        self.possible && self.since >= self.needed
    }

    /// Notes a wait in which it slept at once.
    pub(crate) fn slept(&mut self) {
        self.since = self.since.saturating_add(1);
    }

    /// Notes a wait in which it spun, and whether a message came meanwhile.
    pub(crate) fn spun(&mut self, came: bool) {
        if came {
            self.paid = self.paid.saturating_add(1);
            return;
        }
        let has_paid = std::mem::take(&mut self.paid) >= PAYS;
        self.needed = if has_paid { 0 } else { (self.needed * 2).clamp(1, MOST_NEEDED) };
        self.since = 0;
    }
}

/// How to look for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Without waiting.
    Now,
    /// Asleep until there is one, or it is time to look again.
    Asleep,
}

/// On a single one the sender would wait for the receiver's turn to end.
fn several_processors() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| std::thread::available_parallelism().is_ok_and(|count| count.get() > 1))
}

#[cfg(test)]
mod tests;
