use super::*;

#[test]
fn regions_have_their_allocations() {
    let extent = |size| DescribedExtent { size, generation: 0 };
    let nested = [vec![extent(1)], vec![extent(2), extent(3)], vec![extent(4)]];
    let regions: DescribedRegions = nested.iter().cloned().collect();
    let listed = regions.as_regions();
    assert_eq!(listed.iter().map(<[_]>::to_vec).collect::<Vec<_>>(), nested);
    assert_eq!((listed.len(), listed.allocations()), (3, 4));
    assert_eq!(regions.as_regions().to_owned(), regions);
    let one = Regions::one(&nested[1]);
    assert_eq!(one.iter().collect::<Vec<_>>(), [&nested[1][..]]);
    assert_eq!(one.to_owned().as_regions().iter().collect::<Vec<_>>(), [&nested[1][..]]);
}
#[test]
fn regions_are_equal_however_they_are_kept() {
    let extent = DescribedExtent { size: 1, generation: 2 };
    let one = PartRegions::One(vec![extent; 2]);
    let many = |regions: &[&[DescribedExtent]]| {
        PartRegions::Many(Arc::new(regions.iter().map(|region| region.iter().copied()).collect()))
    };
    assert_eq!(one, many(&[&[extent; 2]]));
    assert_ne!(one, many(&[&[extent], &[extent]]));
}
