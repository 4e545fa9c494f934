use super::*;

#[test]
fn allocations_up_to_both_limits_are_accepted() {
    assert!(check_counts(1, 1).is_ok());
    assert!(check_counts(MAX_EXTENTS, MAX_EXTENTS).is_ok());
    assert!(check_counts(MAX_EXTENTS, MAX_REGIONS_ALLOCATIONS).is_ok());
}

#[test]
fn allocations_beyond_either_limit_are_refused() {
    for (of_a_region, of_the_set) in [
        (MAX_EXTENTS + 1, MAX_EXTENTS + 1),
        (MAX_EXTENTS + 2, MAX_REGIONS_ALLOCATIONS),
        (1, MAX_REGIONS_ALLOCATIONS + 1),
        (MAX_EXTENTS, MAX_REGIONS_ALLOCATIONS + 2),
    ] {
        let refused = check_counts(of_a_region, of_the_set).unwrap_err().to_string();
        assert!(refused.contains("at most 65536") && refused.contains("2048"), "{refused}");
    }
}
