//! When a receiver spins before it sleeps: to be woken by the kernel takes longer than a hand-over.

use std::sync::OnceLock;
use std::time::Duration;

/// How long a receiver looks again and again before it sleeps, where nothing else is said.
pub(crate) const SPIN: Duration = Duration::from_micros(50);

/// The most waits that pass before it spins again.
const MOST_NEEDED: u32 = 256;

/// So many messages that were spun for pay for spinning in vain once: each saves some microseconds.
const PAYS: u32 = 16;

/// How messages have been coming. A receiver spins as long as they come while it does. Where that was in vain, as the sender is
/// silent or has no processor to run on, it sleeps the next time, and then twice as often, and so on; unless spinning has paid
/// before, as with messages that come in bursts. How long it slept says nothing: that may be what the waking took.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Waits since it last spun in vain, and how many there have to be.
    since: u32,
    needed: u32,
    /// Messages that were spun for since then.
    paid: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { since: 0, needed: 1, paid: 0 }
    }
}

impl Pace {
    /// Is it worth while to spin now?
    pub(crate) fn spins(&self) -> bool {
        self.since >= self.needed && several_processors()
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
}
