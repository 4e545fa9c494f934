use super::*;

#[test]
fn seeds_are_decoded() {
    let seeds = descriptor_seeds();
    assert!(seeds.iter().any(|(name, _)| name == "ring-sixteen-slots"));
    for (name, bytes) in seeds {
        let read = if name.starts_with("table-") {
            TensorTable::from_bytes(&bytes).map(drop).map_err(Into::into)
        } else if name.starts_with("grant") {
            Grant::from_bytes(&bytes).map(drop)
        } else if name.ends_with("-text") {
            str::from_utf8(&bytes).unwrap().parse::<Descriptor>().map(drop)
        } else {
            Descriptor::from_bytes(&bytes).map(drop).map_err(Into::into)
        };
        read.unwrap_or_else(|error: crate::Error| panic!("{name}: {error}"));
        descriptor(&bytes);
    }
}
