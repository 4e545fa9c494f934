//! When a receiver spins before it sleeps: to be woken by the kernel takes longer than a hand-over.

use std::sync::OnceLock;
use std::time::Duration;

use super::connection::SPIN;

/// The most quick messages in a row that are needed before it spins again.
const MOST_NEEDED: u32 = 256;

/// How messages have been coming. A receiver spins while they come quickly. Where that was in vain, as the sender is silent
/// or has no processor to run on, so many more of them have to come quickly before it does again.
#[derive(Debug)]
pub(super) struct Pace {
    quick: u32,
    needed: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { quick: 0, needed: 1 }
    }
}

impl Pace {
    /// Is it worth while to spin now?
    pub(super) fn spins(&self) -> bool {
        self.quick >= self.needed && several_processors()
    }

    /// Notes how long a message was waited for, and whether by spinning at first.
    pub(super) fn waited(&mut self, time: Duration, spun: bool) {
        if time < SPIN {
            self.quick = self.quick.saturating_add(1);
            // It has paid for a while: an exception is no reason to wait long.
            if spun && self.quick.is_multiple_of(MOST_NEEDED) {
                self.needed = 1;
            }
        } else {
            self.quick = 0;
            if spun {
                self.needed = (self.needed * 2).min(MOST_NEEDED);
            }
        }
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

    const QUICK: Duration = Duration::from_micros(10);
    const SLOW: Duration = Duration::from_millis(10);

    fn wanted(pace: &Pace) -> bool {
        pace.quick >= pace.needed
    }

    #[test]
    fn it_spins_while_messages_come_quickly() {
        let mut pace = Pace::default();
        assert!(!wanted(&pace), "nothing is known of the sender yet");
        pace.waited(QUICK, false);
        assert!(wanted(&pace));
        pace.waited(SLOW, true);
        assert!(!wanted(&pace), "a silent sender");
    }

    #[test]
    fn what_was_in_vain_is_done_less_and_less_often() {
        let mut pace = Pace::default();
        let mut spun = 0;
        for _ in 0..10_000 {
            // As on a busy machine: quick where it sleeps, and late where it spins.
            let spins = wanted(&pace);
            spun += u32::from(spins);
            pace.waited(if spins { SLOW } else { QUICK }, spins);
        }
        assert!(spun < 60, "{spun} of 10000 waits were spun for in vain");
        for _ in 0..3 * MOST_NEEDED {
            pace.waited(QUICK, wanted(&pace));
        }
        pace.waited(SLOW, true);
        assert_eq!(pace.needed, 2, "it has paid since");
    }
}
