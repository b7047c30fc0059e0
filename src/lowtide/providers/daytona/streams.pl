# For `pump.pl` and `gather.pl`: bytes as base64, and writing all of them.
sub encoded {
	my ($d) = @_;
	return "" if !length $d;
	my $x = pack("u", $d);
	$x =~ s/^.//mg;
	$x =~ tr/\n//d;
	$x =~ tr|` -_|AA-Za-z0-9+/|;
	my $pad = (3 - length($d) % 3) % 3;
	substr($x, -$pad) = "=" x $pad if $pad;
	return $x;
}
sub all { my ($f, $d) = @_; while (length $d) { my $n = syswrite $f, $d; if (defined $n) { substr($d, 0, $n) = "" } elsif ($! != 4) { last } } }
