//! 64-bit words that streams write and wait for.

use device_ipc_mock_engine::Address;

use crate::abi::Handle;
use crate::block::{Block, Operand};
use crate::call::calls;
use crate::simulator::Simulator;
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};

const GREATER_OR_EQUAL: u32 = 0;
const EQUAL: u32 = 1;
const AND: u32 = 2;
const NOR: u32 = 3;

/// Returns the comparison of a flag, as the vendor's header defines it.
fn comparison(flag: u32, value: u64) -> impl Fn(u64) -> bool + Send + 'static {
    move |word| match flag {
        GREATER_OR_EQUAL => word.wrapping_sub(value).cast_signed() >= 0,
        EQUAL => word == value,
        AND => word & value != 0,
        _ => !(word | value) != 0,
    }
}

impl Simulator {
    /// Returns the memory of a word that streams may access.
    fn word_at(&self, address: u64) -> Outcome<Block> {
        match self.operand(address, 8)? {
            Operand::Known(_, blocks) if self.config.host_words && blocks[0].is_registered() => Ok(blocks[0]),
            _ => self.device_operand(address, 8),
        }
    }
}

calls! {
    /// Submits a write of a word.
    run fn aclrtValueWrite(sim, pointer: Handle, value: u64, flag: u32, stream: Handle) {
        let address = pointer.required("devAddr")?;
        sim.require(Feature::ValueWaitAndWrite)?;
        if flag != 0 {
            return refuse(Status::RT_PARAM_INVALID, "flag must be 0");
        }
        let block = sim.word_at(address)?;
        let target = sim.target(stream)?;
        sim.require_access(target.device, &block)?;
        Ok(sim.machine.write_value64(target.stream, Address::new(address), value)?)
    }

    /// Makes a stream wait for a word.
    run fn aclrtValueWait(sim, pointer: Handle, value: u64, flag: u32, stream: Handle) {
        let address = pointer.required("devAddr")?;
        sim.require(Feature::ValueWaitAndWrite)?;
        if flag > NOR {
            return refuse(Status::RT_PARAM_INVALID, format!("no comparison {flag}"));
        }
        let block = sim.word_at(address)?;
        let target = sim.target(stream)?;
        sim.require_access(target.device, &block)?;
        let ready = comparison(flag, value);
        Ok(sim.machine.wait_word(target.stream, Address::new(address), ready, None, None)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_compare_by_flag() {
        for (flag, value, holds, fails) in [
            (GREATER_OR_EQUAL, 5, 5, 4),
            (GREATER_OR_EQUAL, u64::MAX, 0, u64::MAX - 1),
            (EQUAL, 5, 5, 6),
            (AND, 6, 2, 9),
            (NOR, 1, 2, u64::MAX),
        ] {
            assert!(comparison(flag, value)(holds), "{flag} {value} {holds}");
            assert!(!comparison(flag, value)(fails), "{flag} {value} {fails}");
        }
    }
}
