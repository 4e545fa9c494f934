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
mod tests {
    use super::*;

    fn wanted(pace: &Pace) -> bool {
        pace.since >= pace.needed
    }

    /// A wait for a message that comes at once to who spins, or not.
    fn wait(pace: &mut Pace, comes: bool) -> bool {
        let spins = wanted(pace);
        if spins {
            pace.spun(comes)
        } else {
            pace.slept()
        }
        spins
    }

    #[test]
    fn it_spins_while_messages_come_meanwhile() {
        let mut pace = Pace::default();
        assert!(!wait(&mut pace, true), "nothing is known of the sender yet");
        assert!((0..1000).all(|_| wait(&mut pace, true)));
        assert!(wait(&mut pace, false), "a pause of the sender");
        assert!(wait(&mut pace, false), "it had paid");
        assert!(!wait(&mut pace, true));
        assert!(wait(&mut pace, true));
    }

    #[test]
    fn what_was_in_vain_is_done_less_and_less_often() {
        let mut pace = Pace::default();
        // As on a busy machine, where the sender has no processor while this end spins.
        let spun = (0..10_000).filter(|_| wait(&mut pace, false)).count();
        assert!(spun < 60, "{spun} of 10000 waits were spun for in vain");
        let slept = (0..1000).filter(|_| !wait(&mut pace, true)).count() as u32;
        assert!(slept <= MOST_NEEDED, "{slept} waits passed before it was tried again");
        wait(&mut pace, false);
        assert_eq!(pace.needed, 0, "it has paid since");
    }

    #[test]
    fn bursts_are_spun_for_whatever_lies_between_them() {
        let mut pace = Pace::default();
        for burst in 0..1000 {
            let spun = (0..2 * PAYS).filter(|_| wait(&mut pace, true)).count() as u32;
            assert!(spun >= PAYS, "burst {burst}");
            wait(&mut pace, false);
        }
    }

    #[test]
    fn what_comes_while_the_sender_has_the_processor_is_spun_for_in_vain() {
        let mut pace = Pace::default();
        let mut spun = 0;
        for _ in 0..1000 {
            if wanted(&pace) {
                spun += 1;
                pace.found(3 * OWN_PROCESSOR, true);
            } else {
                pace.slept();
            }
        }
        assert!(spun < 20, "{spun} of 1000");
    }

    #[test]
    fn a_spin_ends_with_its_limit_and_a_sleep_with_what_is_found() {
        let mut pace = Pace::default();
        let mut looks = Vec::new();
        let found = pace.wait_so(true, None, |how| {
            looks.push(how);
            let asleep = looks.iter().filter(|look| **look == Look::Asleep).count();
            Ok::<_, ()>((asleep == 2).then_some(7))
        });
        assert_eq!(found, Ok(7));
        let spun = looks.iter().take_while(|look| **look == Look::Now).count();
        assert!(spun > 0 && looks[spun..] == [Look::Asleep; 2], "{looks:?}");
        let refused = pace.wait_so(true, Some(Instant::now()), |how| {
            if how == Look::Now { Ok(None) } else { Err::<Option<()>, _>(8) }
        });
        assert_eq!(refused, Err(8), "an error ends it");
    }
}
