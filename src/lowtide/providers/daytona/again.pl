# Inside `once.pl`: sent a second time. The first one answers.
for (1 .. 600) {
	if (open A, "<", "$b.a") { local $/; syswrite STDOUT, <A>; exit 0 }
	my $pid = open(K, "<", $b) ? <K> : "";
	answer(*STDOUT, "-;") if $pid && !-d "/proc/$pid" && !-e "$b.a";
	select undef, undef, undef, 0.02;
}
answer(*STDOUT, "-;");
